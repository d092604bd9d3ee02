"""Make the pictures of the README from real runs: `python docs/assets/pictures.py [FOLDER]`.

report.png is the page of a run on two ranks, as Chromium draws it. terminal.svg is what a run
writes onto a terminal. Both take some minutes on two cores; a folder of an earlier call is reused.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT  # has no public name
from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

ASSETS = Path(__file__).parent
COLUMNS = 104
LINES = {
    "terminal": "train recipe=quickstart steps=24 log.every=2 eval.samples=256",
    "report": "train name=two-ranks model.width=48 model.num_heads=2 data.max_length=128 "
    "batch.global=64 accum=fixed accum.micro=6 parallel.ranks=2 device=cpu steps=120 "
    "eval.every=12 eval.samples=64 checkpoint.every=30 log.noise_scale=4",
}
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def main() -> None:
    """Run, and draw."""
    place = Path(sys.argv[1] if sys.argv[1:] else tempfile.mkdtemp()).absolute()
    for name, line in LINES.items():
        folder = place / name
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "screen.txt").is_file():
            environment = {**os.environ, "COLUMNS": str(COLUMNS), "FORCE_COLOR": "1"}
            argv = [sys.executable, "-m", "trainer", *line.split()[1:]]
            done = subprocess.run(
                argv, cwd=folder, env=environment, stdout=subprocess.PIPE, check=True
            )
            (folder / "screen.txt").write_bytes(done.stdout)
    draw_terminal(LINES["terminal"], (place / "terminal" / "screen.txt").read_text())
    (page,) = place.glob("report/outputs/*/*/report.html")
    draw_page(page)


def draw_terminal(line: str, output: str) -> None:
    """Draw what was written, under the command."""
    record = Path(os.devnull).open("w")  # noqa: SIM115 - until the process ends
    console = Console(record=True, width=COLUMNS, file=record, force_terminal=True)
    console.print(Text.assemble(("$ ", "bold green"), (line, "bold")))
    console.print(Text.from_ansi(output.rstrip()))
    # Fonts would be fetched; the reader's own will do.
    plain = re.sub(r"@font-face {{.*?}}\n", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    plain = re.sub(r"<!-- .*? -->\n", "", plain).replace(
        "Fira Code", "ui-monospace, Menlo, Consolas"
    )
    svg = console.export_svg(title="train", theme=SVG_EXPORT_THEME, code_format=plain)
    (ASSETS / "terminal.svg").write_text(svg)


def draw_page(page: Path) -> None:
    """Take a picture of the top of a page."""
    browser = next(filter(None, map(shutil.which, BROWSERS)))
    argv = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    argv += ["--virtual-time-budget=3000", "--window-size=1180,1500"]
    argv += [f"--screenshot={ASSETS / 'report.png'}", f"{page.as_uri()}#light"]
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run([*argv, f"--user-data-dir={profile}"], capture_output=True, check=True)


if __name__ == "__main__":
    main()
