"""What a person sees: blocks, lines, the bar, train.log, hooks; rendered, not mocked."""

import io
import os
import pty
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.text import Text

from trainer.core.rows import row
from trainer.core.run_folder import RunFolder
from trainer.report.blocks import end_block, plan_block, start_block
from trainer.report.console import BRIEF, Screen
from trainer.report.hooks import Hooks
from trainer.report.reporter import RunReporter

CAP: dict[str, Any] = {
    "max_tokens": 4096, "micro_batches": 6, "padding": 0.01, "predicted_bytes": 240 << 20,
    "predicted_seconds": None, "fits": True, "is_chosen": False, "recomputes": False,
}  # fmt: skip
SHAPE: dict[str, Any] = {"rank": 0, "num_samples": 384, "length": 20, "packed": False}
PLAN: dict[str, Any] = {
    "steps": 60, "device": "cpu", "num_samples": 18_342, "num_tokens": 3_120_000,
    "shapes": [SHAPE],
    "candidates": [
        CAP | {"max_tokens": 8192, "micro_batches": 3, "is_chosen": True},
        CAP | {"max_tokens": 1 << 20, "micro_batches": 1, "fits": False},
    ],
    "warnings": ["BatchNorm in [net.bn1]: type batchnorm=micro"],
}  # fmt: skip

ROWS = [
    row("batch", "512 samples", group="asked"),
    row("tail", "keep: the last 118 samples of an epoch"),
    row("cut", "1 rank x 3 micro-batches of 32 to 384 samples", group="computed"),
    row("", "the smallest that reaches 97% of the best throughput " * 3),
    row("time", None, group="computed", step_seconds=None),
    row("steps", "60 = 1 epoch", group="asked"),
]


def record(step: int = 1, **changes: Any) -> dict[str, Any]:
    values = {
        "step": step, "epoch": step / 36, "samples": 512 * step, "tokens": 41_200 * step,
        "loss": 5.0 - step / 100, "lr": 2e-2, "grad_norm": 0.83, "accum_steps": 3,
        "micro_batches": 3, "padding": 0.014, "seconds": 1.0, "tokens_per_second": 41_200.0,
        "memory_bytes": None,
    }  # fmt: skip
    return values | changes


RESULT: dict[str, Any] = {
    "step": 60, "loss": 2.5, "eval_loss": 2.4862, "tokens_per_second": 41_234.2, "seconds": 128.0,
    "metrics": {"loss": 2.4862, "accuracy": 0.31}, "peak_bytes": None, "skipped_steps": 0,
    "baselines": {"byte unigram": 3.3121, "byte bigram": 2.4101}, "replays": 0,
}  # fmt: skip


def shown(block, monkeypatch) -> str:
    """Show a block without a terminal: every line fits, and none ends in blanks or colours."""
    monkeypatch.setenv("COLUMNS", "80")
    file = io.StringIO()
    Screen(file=file).show(block)
    for line in file.getvalue().splitlines():
        assert len(line.rstrip()) == len(line) <= 80
        assert "\x1b" not in line
    return file.getvalue()


@pytest.fixture
def terminal(monkeypatch):
    """A terminal of 80 columns, and what has been written to it."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    ours, theirs = pty.openpty()
    chunks: list[bytes] = []

    def drain():
        try:
            while chunk := os.read(ours, 4096):
                chunks.append(chunk)
        except OSError:
            pass

    reader = threading.Thread(target=drain)
    reader.start()
    with os.fdopen(theirs, "w") as file:
        yield file, lambda: (file.flush(), reader.join(0.2), b"".join(chunks).decode())[-1]
    reader.join()
    os.close(ours)


def test_the_start_shows_what_was_asked_and_computed_and_a_plan_all_and_the_cap(monkeypatch):
    text = shown(plan_block(ROWS, PLAN, Path("plan.json")), monkeypatch)
    (chosen,) = [line for line in text.splitlines() if "<- chosen" in line]
    assert chosen.split()[:2] == ["8,192", "3"]
    assert "does not fit" in text
    assert "warning: BatchNorm in [net.bn1]: type batchnorm=micro" in text
    labels = [line[2:15].strip() for line in text.splitlines()]
    order = ["batch", "steps", "how it is com", "cut", "in detail", "tail", "cut"]
    assert [label for label in labels if label in order] == order, "a row that goes on is named"
    assert "time  " not in text
    text = shown(start_block(ROWS, ["odd"], Path("run"), name="mine"), monkeypatch)
    title, *lines = text.splitlines()
    assert title.startswith("train mine ──")
    labels = [line[2:15].strip() for line in lines]
    assert labels == [*order[:2], "output", "", order[2], "cut", "", "warning: odd"]


def test_the_end_sets_the_loss_beside_each_baseline(monkeypatch):
    text = shown(end_block(PLAN, RESULT), monkeypatch)
    assert "byte unigram   3.3121   this model is 0.8259 better" in text
    assert "byte bigram    2.4101   this model is 0.0761 worse, after 60 steps" in text
    assert "60 steps, 2 min 8 s after the start" in text


def test_without_a_terminal_each_due_step_is_one_aligned_line(tmp_path):
    file = io.StringIO()
    reporter = RunReporter(tmp_path, Screen(file=file), log_every=10)
    reporter.start(ROWS, PLAN)
    for step in (1, 7, 10, 60):
        reporter.step(record(step))
    reporter.close()
    lines = [line for line in file.getvalue().splitlines() if line.startswith("step")]
    assert [int(line[5:7]) for line in lines] == [1, 10, 60]
    assert len({len(line) for line in lines}) == 1
    assert lines[1].startswith(
        "step 10/60  loss   4.9000  41.2k tokens/s  padding  1.4%  grad norm  0.83  lr 2.00e-02"
    )


def test_a_terminal_shows_a_bar_and_the_log_the_same_lines_without_colour(tmp_path, terminal):
    file, seen = terminal
    reporter = RunReporter(tmp_path, Screen(tmp_path, file=file), log_every=10)
    reporter.start(ROWS, PLAN)
    for step in range(1, 31):
        reporter.step(record(step))
    reporter.evaluation(30, {"": {"loss": 4.5}}, 1.0)
    assert "━" in seen()
    assert "\x1b[36mbatch " in seen()
    assert "\x1b[2;36mcut " in seen(), "dim"
    reporter.finish(RESULT, [])
    reporter.close()
    assert "30/60  held out: loss 4.5000" in seen()
    log = (tmp_path / RunFolder.LOG).read_text()
    assert "\x1b" not in log
    assert "━" not in log
    assert "step 20/60  loss   4.8000" in log
    assert "step 30/60  held out: loss 4.5000  (1.0 s)" in log
    assert seen().rfind("\x1b[?25h") > seen().rfind("\x1b[?25l"), "the cursor stays visible"


def test_a_terminal_breaks_prose_at_words_and_neither_paths_nor_commands(tmp_path, terminal):
    file, seen = terminal
    screen, path = Screen(tmp_path, file=file), f"outputs/{'long-' * 20}name/report.html"
    words = "stops after this step " * 6
    screen.warn(f"{words}{path} end")
    screen.line(f"  train {words}", is_command=True)
    screen.close()
    plain = re.sub(r"\x1b\[[\d;]*m", "", seen()).replace("\r", "")
    *prose, whole, end, command = plain.splitlines()
    assert (whole, end, command) == (path, "end", f"  train {words}")
    assert " ".join(prose) == f"warning: {words.strip()}"
    assert len(prose) == 2
    assert max(map(len, prose)) <= 80
    assert f"warning: {words}{path} end\n" in (tmp_path / RunFolder.LOG).read_text()


class Gives:
    def on_step(self, values):
        return {"tiny": 4.412345e-6, "large": 12.5}

    def on_eval(self, values):
        return {"bleu": 0.031234}


def test_figures_of_hooks_are_shown_with_four_digits_of_evaluations_too(tmp_path):
    file, hooks = io.StringIO(), Hooks({"mine": Gives()}, pytest.fail)
    reporter = RunReporter(tmp_path, Screen(file=file), hooks=hooks)
    reporter.start(ROWS, PLAN)
    reporter.step(record(1))
    reporter.evaluation(1, {"a": {"loss": 4.5}, "b": {"loss": 3.5}}, 1.0)
    reporter.close()
    assert "tiny 4.412e-06  large 12.5000  " in file.getvalue()
    assert "a: loss 4.5000\n" in file.getvalue()
    assert "b: loss 3.5000  bleu 0.03123  (1.0 s)\n" in file.getvalue()


class Gone(io.StringIO):
    def write(self, text):
        raise OSError(5, "Input/output error")


def test_a_screen_that_is_gone_falls_silent_and_a_brief_one_is_the_logs(tmp_path, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as left:  # to close it breaks nothing either
        for file in (left, Gone()):
            screen = Screen(tmp_path, file=file)
            screen.line("one")
            screen.show(Text("two"))
            screen.close()
    monkeypatch.setenv(BRIEF, "1")
    brief = io.StringIO()
    screen = Screen(tmp_path, file=brief)
    screen.line("three")
    screen.close()
    assert brief.getvalue() == ""
    assert (tmp_path / RunFolder.LOG).read_text() == "one\ntwo\n" * 2 + "three\n"
