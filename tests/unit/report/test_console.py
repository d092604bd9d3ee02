"""The screen on its own: it never stops a run, and prints text as it is."""

from __future__ import annotations

import io

from rich.panel import Panel
from rich.text import Text

from trainer.report.console import LOG_FILE, Screen


def test_a_screen_that_is_gone_does_not_stop_a_run(tmp_path):
    class Gone(io.StringIO):
        def write(self, text):
            raise OSError(5, "Input/output error")

    screen = Screen(tmp_path, file=Gone())
    screen.line("first")
    screen.show(Panel(Text("block")))
    screen.close()
    assert "first" in (tmp_path / LOG_FILE).read_text()


def test_a_terminal_that_knows_only_ascii_gets_escapes():
    raw = io.BytesIO()
    screen = Screen(file=io.TextIOWrapper(raw, encoding="ascii"))
    screen.line("é")
    screen.show(Panel(Text("block")))
    assert b"\\xe9" in raw.getvalue()


def test_brackets_are_text_not_markup():
    file = io.StringIO()
    Screen(file=file).line("[red]x[/red] :smile:")
    assert file.getvalue() == "[red]x[/red] :smile:\n"


def test_time_left_is_the_mean_of_the_steps_after_the_first():
    now, file = [100.0], io.StringIO()
    screen = Screen(file=file)
    screen._console.get_time = lambda: now[0]
    screen.begin(0, 10)
    figures = {"tokens_per_second": 1.0, "padding": 0.0, "grad_norm": 1.0, "lr": 1.0, "loss": 1.0}
    for step, seconds in ((1, 30.0), (2, 1.0), (3, 1.0)):
        screen.step({"step": step, "seconds": seconds, **figures}, is_due=True)
        now[0] += 2.0
    left = [line.split("  ")[-1].strip() for line in file.getvalue().splitlines()]
    assert left == ["4:30 left", "0:16 left", "0:14 left"]
