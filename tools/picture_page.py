"""A picture of a demo's page, for the README: what it says first, where the time went, the timeline.

    picture_page.py FOLDER PICTURE

Refuses a demo whose runs were not sound: figures in a picture are read like any others.
"""
import json
import os
import pathlib
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tests", "system"))
from browser_support import CHROMIUM, FLAGS, sync_playwright  # noqa: E402
from claims_support import is_sound  # noqa: E402

WIDTH = 1100
BYTES_MAX = 300 * 1024
# The rest of the page is left to whoever opens it.
LEFT_OUT = "main > section:not([aria-labelledby=h-time], #timeline-section), footer, .hint, #timeline-tools"


def main():
    folder, picture = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2])
    answer = json.loads((folder / "loop.json").read_text())
    if not is_sound(answer):
        sys.exit(f"picture: {folder.name} was not sound ({answer['cpu_busy_percent']:.0f} % busy, "
                 f"{answer['steal_percent']:.0f} % stolen); run tools/demo again in a quiet minute")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport={"width": WIDTH, "height": 900}, color_scheme="light")
        page.goto((folder / "report.html").as_uri())
        page.wait_for_function("() => window.weftTimeline")
        page.add_style_tag(content=f"{LEFT_OUT} {{ display: none !important; }}")
        page.evaluate("() => weftTimeline.reset()")
        page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        page.screenshot(path=picture, full_page=True)
        browser.close()
    size = picture.stat().st_size
    if size > BYTES_MAX:
        sys.exit(f"picture: {size} bytes are more than the README should load")
    print(f"wrote {picture}, {size} bytes")


if __name__ == "__main__":
    main()
