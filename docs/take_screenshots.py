"""Take the pictures of docs/monitoring.md: `python docs/take_screenshots.py RUNS` writes docs/monitoring-*.png.

RUNS is the folder with the runs `good`, `rate-too-high` and `bad-batch`, made as that page says. TensorBoard serves
them, and playwright (pip install -e '.[test]') drives Debian's chromium.
"""

import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import quote, urlencode

from PIL import Image
from playwright.sync_api import Page, sync_playwright

ADDRESS = "http://127.0.0.1:6199"
VIEW = {"width": 1300, "height": 815}  # pixels: four curves
# Picture, regular expressions of runs and of tags.
CURVES = (
    ("good", "good", "^(train/(mlm_loss|gradient_norm)|validation/mlm_(loss|accuracy))$"),
    ("bad", "", "^(train/(mlm_loss|gradient_norm|skipped_steps)|validation/mlm_accuracy)$"),
    ("layers", "good|rate", "^(gradient_norm|update_ratio)/layer_0[03]$"),
    ("speed", "good", "^speed/(tokens_per_second|mfu|step_seconds/max|communication_share)$"),
)


def take(page: Page, name: str) -> None:
    """A picture of what the page shows once it rests, in 64 colours."""
    page.wait_for_load_state("networkidle")
    page.wait_for_timeout(3000)  # curves glide to their places
    path = Path(__file__).with_name(f"monitoring-{name}.png")
    page.screenshot(path=path)
    Image.open(path).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)


def curves(page: Page, name: str, runs: str, tags: str) -> None:
    query = urlencode({"darkMode": "false", "smoothing": "0", "runFilter": runs, "tagFilter": tags}, quote_via=quote)
    page.goto(f"{ADDRESS}/?{query}#timeseries")
    page.get_by_text("Enable step selection and data table").click()  # no tables below the curves
    page.get_by_role("button", name="Settings").last.click()  # and no settings beside them
    take(page, name)


def texts(page: Page) -> None:
    page.goto(f"{ADDRESS}/?darkMode=false#text&tagFilter=blanks&regexInput=good")
    page.get_by_text("guesses").first.wait_for()
    take(page, "text-end")
    page.locator(".step-container").last.scroll_into_view_if_needed()
    take(page, "text-start")


def main(runs: Path) -> None:
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(runs), "--port", ADDRESS.rpartition(":")[2]]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while True:
            try:
                if b"good" in urllib.request.urlopen(f"{ADDRESS}/data/runs").read():
                    break
            except urllib.error.URLError:
                time.sleep(0.5)
        with sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            for picture in CURVES:  # a new page each: TensorBoard remembers what was clicked
                curves(browser.new_page(viewport=VIEW), *picture)
            texts(browser.new_page(viewport=VIEW))
    finally:
        server.terminate()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
