"""Write docs/pictures/report.png and explain.png from the run of the README's quick start:  python docs/pictures/screenshots.py RUN

Needs playwright and Debian's chromium.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright
from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME
from rich.text import Text

PICTURES = Path(__file__).parent
TEXT = "The comet was brighter than the old lighthouse."
COMMAND = ["cramlm", "explain", "runs/hobbies", TEXT, "--passages", "1"]


def terminal(run: Path) -> str:
    """Return `cramlm explain` and what it prints as an HTML page."""
    command = [*COMMAND[:2], str(run), *COMMAND[3:]]
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": "92"}
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    console = Console(record=True, width=92, file=io.StringIO())
    console.print(Text(f'$ {" ".join(COMMAND[:3])} "{TEXT}" --passages 1'))
    console.print(Text.from_ansi(printed))
    style = "body {{ margin: 0; padding: 14px 18px; font-size: 15px; line-height: 1.3 }}"
    page = console.export_html(theme=DEFAULT_TERMINAL_THEME, inline_styles=True)
    return page.replace("</head>", f"<style>{style.format()}</style></head>")


def main(run: Path) -> None:
    """Take both pictures."""
    program = shutil.which("chromium")
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as name:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1100, "height": 900}, color_scheme="light")
        tab.goto((run / "report.html").resolve().as_uri())
        tab.screenshot(path=PICTURES / "report.png")
        page = Path(name) / "explain.html"
        page.write_text(terminal(run), "utf-8")
        tab.set_viewport_size({"width": 860, "height": 100})
        tab.goto(page.as_uri())
        tab.screenshot(path=PICTURES / "explain.png", full_page=True)
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
