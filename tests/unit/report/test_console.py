"""The screen on its own: it never stops a run, and prints text as it is."""

from __future__ import annotations

import contextlib
import io
import os

from rich.panel import Panel
from rich.text import Text

from trainer.report.console import LOG_FILE, Progress, Screen


def test_a_screen_that_is_gone_does_not_stop_a_run(tmp_path):
    class Gone(io.StringIO):
        def write(self, text):
            raise OSError(5, "Input/output error")

    screen = Screen(tmp_path, file=Gone())
    screen.line("first")
    screen.show(Panel(Text("block")))
    screen.close()
    assert "first" in (tmp_path / LOG_FILE).read_text()


def test_a_pipe_that_is_closed_does_not_stop_a_run():
    reading, writing = os.pipe()
    os.close(reading)
    file = os.fdopen(writing, "w", buffering=1)
    screen = Screen(file=file)
    for _ in range(3):
        screen.line("nobody listens")
    with contextlib.suppress(BrokenPipeError):
        file.close()


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


def test_time_left_is_the_mean_of_the_steps_after_the_first(monkeypatch):
    now = iter([100.0, 102.0, 104.0])
    monkeypatch.setattr("trainer.report.console.time.monotonic", lambda: next(now))
    progress = Progress(0, 10)
    assert progress.left_s() is None
    progress.advance({"step": 1, "seconds": 30.0})
    assert progress.left_s() == 270.0
    progress.advance({"step": 2, "seconds": 1.0})
    progress.advance({"step": 3, "seconds": 1.0})
    assert progress.left_s() == 14.0
