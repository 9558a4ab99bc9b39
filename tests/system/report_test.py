"""A report in a real browser: it opens from disk, asks the network for nothing, and its timeline moves.

    report_test.py PAGE [PROGRAM ARGUMENT...]

PROGRAM, if given, is run first and makes the page; it finds the path in $WEFT_REPORT_PAGE too.
Pictures are left beside the page. The page needs at least two runs with a trace and a diagnosis.
"""
import os
import pathlib
import re
import subprocess
import sys

from browser_support import CHROMIUM, FLAGS, sync_playwright

# How many colours, and how many pixels that are not the most frequent one.
PIXELS = """() => {
  const canvas = document.getElementById('timeline-canvas');
  const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  const seen = new Map();
  for (let i = 0; i < data.length; i += 4) {
    const colour = (data[i] << 16) | (data[i + 1] << 8) | data[i + 2];
    seen.set(colour, (seen.get(colour) || 0) + 1);
  }
  const counts = [...seen.values()];
  return {colours: counts.filter((n) => n > 20).length,
          drawn: 1 - Math.max(...counts) / (data.length / 4)};
}"""
# The middle of a span on a device row that is in view, in the page's coordinates.
SPAN = """() => {
  const {from, to, rows, xOf} = window.weftTimeline;
  const box = document.getElementById('timeline').getBoundingClientRect();
  for (const row of rows) {
    if (row.part !== 'device') continue;
    for (let i = 0; i < row.count; ++i) {
      const middle = row.start[i] + row.duration[i] / 2;
      if (middle < from || middle > to || xOf(row.start[i] + row.duration[i]) - xOf(row.start[i]) < 2)
        continue;
      return {x: box.left + 1 + xOf(middle), y: box.top + 1 + row.y + row.height / 2,
              rank: row.rank};
    }
  }
  return null;
}"""


# Words of cells and headings that stand on more than one line, though a window could hold them.
BROKEN = """() => {
  const found = [];
  const range = document.createRange();
  for (const cell of document.querySelectorAll('th, td, h3, li, .bar-label')) {
    const walker = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
    for (let node = walker.nextNode(); node; node = walker.nextNode())
      for (const word of node.data.matchAll(/[^\\s-]+/g)) {
        if (word[0].length > 24) continue;
        range.setStart(node, word.index);
        range.setEnd(node, word.index + word[0].length);
        const lines = new Set([...range.getClientRects()].map((box) => Math.round(box.top)));
        if (lines.size > 1) found.push(word[0]);
      }
  }
  return found;
}"""
# Runs that have nothing to show in view.
EMPTY = """() => {
  const {from, to, rows} = window.weftTimeline;
  const runs = new Set(rows.map((row) => row.run));
  for (const row of rows)
    for (let i = 0; i < row.count; ++i)
      if (row.start[i] < to && row.start[i] + row.duration[i] > from) runs.delete(row.run);
  return [...runs];
}"""


class Opened:
    """The page in one window; whatever it complains about or asks for is kept."""

    def __init__(self, browser, path, width, scheme, javascript=True):
        self.complaints, self.requests = [], []
        self.context = browser.new_context(viewport={"width": width, "height": 900},
                                           color_scheme=scheme, java_script_enabled=javascript)
        self.page = self.context.new_page()
        self.page.on("console", lambda message: self.complaints.append(message.text)
                     if message.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.complaints.append("a dialog"),
                                               dialog.dismiss()))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())
        if javascript:
            self.page.wait_for_function("() => window.weftTimeline")
            self.settle()

    def settle(self):
        """Until what was asked for is drawn."""
        self.page.evaluate("() => new Promise((done) =>"
                           " requestAnimationFrame(() => requestAnimationFrame(done)))")

    def view(self):
        self.settle()
        return self.page.evaluate("() => [weftTimeline.from, weftTimeline.to]")

    def close(self):
        assert not self.complaints, self.complaints
        others = [url for url in self.requests if not url.startswith(("file:", "data:"))]
        assert not others and sum(url.startswith("file:") for url in self.requests) == 1, \
            self.requests
        self.context.close()


def check_text(page):
    verdict = page.locator(".verdict")
    assert verdict.is_visible() and re.search(r"\d ms an iteration", verdict.inner_text()), \
        verdict.inner_text()
    rows = page.locator("table.runs tbody tr")
    assert rows.count() >= 2 and rows.first.is_visible()
    assert page.locator(".bars .bar span").count() >= 2
    assert page.locator("table.path").is_visible()
    path = page.locator("table.path tbody th").all_inner_texts()
    assert all("_" not in name and len(name.splitlines()) == 2 for name in path), path
    lists = page.locator(".cards").all()
    assert lists, "no findings"
    for cards in lists:
        gains = [float(text.split()[0]) for text in cards.locator(".gain b").all_text_contents()]
        assert gains == sorted(gains, reverse=True), gains
    assert page.locator("th:not([scope])").count() == 0
    assert page.locator("#timeline-canvas").get_attribute("aria-label")
    hostile = page.evaluate("() => [window.hacked, document.images.length,"
                            " document.scripts.length, document.querySelectorAll('iframe').length]")
    assert hostile == [None, 0, 2, 0], f"something of the data became markup: {hostile}"


def check_sorting(page):
    table = page.locator("table.sortable").first
    table.evaluate("table => { table.closest('details').open = true; }")
    column = "table => [...table.tBodies[0].rows].map(row => Number(row.cells[2].dataset.v))"
    before = table.evaluate(column)
    assert len(set(before)) > 1, "nothing to sort"
    button = table.locator("thead th").nth(2).locator("button")
    button.click()
    assert table.evaluate(column) == sorted(before, reverse=True)
    button.click()
    assert table.evaluate(column) == sorted(before)


def check_timeline(opened):
    page = opened.page
    page.locator("#timeline").scroll_into_view_if_needed()
    page.evaluate("() => document.getElementById('timeline').scrollIntoView({block: 'center'})")
    opened.settle()
    pixels = page.evaluate(PIXELS)
    assert pixels["colours"] >= 6 and pixels["drawn"] > 0.02, f"the canvas is blank: {pixels}"
    runs = page.evaluate("() => [...new Set(weftTimeline.rows.map((row) => row.run))]")
    assert len(runs) >= 2, runs

    # Hover, where a span is.
    span = page.evaluate(SPAN)
    assert span, "no span in view"
    page.mouse.move(span["x"], span["y"])
    tooltip = page.locator("#tooltip")
    tooltip.wait_for(state="visible")
    said = tooltip.inner_text()
    for word in "start", "duration", f"rank\n{span['rank']}", "iteration", "run":
        assert word in said, (word, said)

    # The wheel zooms around the pointer; what is under it stays there.
    moment = "x => { const {from, to} = weftTimeline; const a = weftTimeline.xOf(from);" \
             " const box = document.getElementById('timeline').getBoundingClientRect();" \
             " return from + (x - box.left - 1 - a) * (to - from) / (weftTimeline.xOf(to) - a); }"
    start, under = opened.view(), page.evaluate(moment, span["x"])
    page.mouse.wheel(0, -400)
    page.wait_for_function("span => weftTimeline.to - weftTimeline.from < span * 0.9",
                           arg=start[1] - start[0])
    zoomed = opened.view()
    drift = abs(page.evaluate(moment, span["x"]) - under)
    assert drift < (zoomed[1] - zoomed[0]) * 0.01, f"what was under the pointer moved by {drift} ns"

    # A drag moves the view and keeps its width.
    page.mouse.down()
    page.mouse.move(span["x"] - 120, span["y"], steps=4)
    page.mouse.up()
    moved = opened.view()
    assert moved[0] > zoomed[0], (zoomed, moved)
    assert abs((moved[1] - moved[0]) - (zoomed[1] - zoomed[0])) < 1, (zoomed, moved)

    # Keys.
    page.locator("#timeline-canvas").focus()
    for key, changed in (("w", lambda a, b: b[1] - b[0] < a[1] - a[0]),
                         ("s", lambda a, b: b[1] - b[0] > a[1] - a[0]),
                         ("d", lambda a, b: b[0] > a[0]), ("a", lambda a, b: b[0] < a[0]),
                         ("ArrowRight", lambda a, b: b[0] > a[0]),
                         ("ArrowLeft", lambda a, b: b[0] < a[0])):
        before = opened.view()
        page.keyboard.press(key)
        after = opened.view()
        assert changed(before, after), (key, before, after)

    # A double click shows all again; a click on a rank opens its rows.
    page.mouse.dblclick(span["x"], span["y"])
    assert [round(t) for t in opened.view()] == [round(t) for t in start], (opened.view(), start)
    rows = page.evaluate("() => weftTimeline.rows.length")
    box = page.locator("#timeline").bounding_box()
    page.mouse.click(box["x"] + 30, span["y"])
    opened.settle()
    assert page.evaluate("() => weftTimeline.rows.length") > rows
    page.mouse.click(box["x"] + 30, span["y"])
    opened.settle()
    assert page.evaluate("() => weftTimeline.rows.length") == rows
    page.mouse.move(2, 2)


def check_zooming(opened):
    """Zooming in does not end where one of the runs is over."""
    page = opened.page
    page.locator("#timeline-canvas").focus()
    box = page.locator("#timeline").bounding_box()
    zoom = page.get_by_role("button", name="Zoom in")
    for name, act in (("key", lambda: page.keyboard.press("w")), ("button", zoom.click),
                      ("wheel at the end", lambda: page.mouse.wheel(0, -240))):
        page.evaluate("() => weftTimeline.reset()")
        before = opened.view()
        page.mouse.move(box["x"] + box["width"] - 5, box["y"] + 60)
        if name == "key":
            page.locator("#timeline-canvas").focus()
        for _ in range(8):
            act()
            now = opened.view()
            assert now[1] - now[0] < before[1] - before[0], (name, before, now)
            before = now
            assert not page.evaluate(EMPTY), (name, now, page.evaluate(EMPTY))
    # Whoever has moved away sees what is there.
    page.evaluate("() => weftTimeline.reset()")
    start = opened.view()
    page.evaluate("([from, to]) => weftTimeline.show(to - (to - from) * 0.2, to)", start)
    page.keyboard.press("w")
    assert opened.view()[0] > start[0] + 0.7 * (start[1] - start[0]), (start, opened.view())
    page.evaluate("() => weftTimeline.reset()")
    opened.settle()


def check_words(page):
    broken = page.evaluate(BROKEN)
    assert not broken, f"broken words: {broken[:10]}"


def background(page):
    colour = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    return sum(int(part) for part in re.findall(r"\d+", colour)[:3]) / 3


def check_width(page):
    wide = page.evaluate("() => [document.documentElement.scrollWidth, innerWidth]")
    assert wide[0] <= wide[1], f"the page is {wide[0]} wide in a window of {wide[1]}"


def main():
    path = pathlib.Path(sys.argv[1]).resolve()
    if len(sys.argv) > 2:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        subprocess.run(sys.argv[2:], check=True, timeout=120, stdout=subprocess.DEVNULL,
                       env={**os.environ, "WEFT_REPORT_PAGE": str(path)})
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        for width in 1280, 800:
            for scheme in "light", "dark":
                opened = Opened(browser, path, width, scheme)
                check_text(opened.page)
                check_width(opened.page)
                bright = background(opened.page)
                assert bright > 200 if scheme == "light" else bright < 60, (scheme, bright)
                check_timeline(opened)
                check_zooming(opened)
                check_words(opened.page)
                opened.page.screenshot(path=path.with_name(f"{path.stem}-{width}-{scheme}.png"),
                                       full_page=True)
                check_sorting(opened.page)
                opened.page.evaluate("() => document.querySelectorAll('details')"
                                     ".forEach((details) => { details.open = true; })")
                check_width(opened.page)
                check_words(opened.page)
                opened.close()
                print(f"{width} px, {scheme}: ok")
        opened = Opened(browser, path, 1280, "light", javascript=False)
        assert opened.page.locator(".verdict").is_visible()
        assert opened.page.locator("table.runs").is_visible()
        opened.close()
        print("without JavaScript: ok")
        browser.close()


if __name__ == "__main__":
    main()
