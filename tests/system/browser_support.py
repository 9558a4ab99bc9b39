"""What tests in a real browser share: where it is, how it is started, and when to skip."""
import os
import shutil
import sys

CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync"]


def skip(why):
    print(f"skipped: {why}", file=sys.stderr)
    sys.exit(77)


try:
    from playwright.sync_api import sync_playwright  # noqa: F401, for those who import this
except ImportError as error:
    skip(f"{error}; tools/setup installs it")
if not os.access(CHROMIUM, os.X_OK):
    skip("no chromium on this machine")
