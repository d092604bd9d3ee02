"""Show a run on the screen: lines and blocks, a progress bar on a terminal, and train.log.

Everything printed goes to train.log as well, without colour. On a terminal the figures of the
current step stand in two live lines at the bottom; elsewhere each due step is a line.
"""

from __future__ import annotations

import os
import time
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TextIO, final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from trainer.checkpoint.store import Loaded
from trainer.config.secrets import without_secrets
from trainer.core.durable import as_save_error, open_log
from trainer.core.format import (
    at_words,
    clock,
    lead_nowhere,
    loss,
    percent,
    printable_lines,
    rate,
    short,
)
from trainer.core.rows import Noun
from trainer.core.run_folder import RunFolder
from trainer.core.stateful import DRAWN, NORMS_OF_PARAMETERS, STEP_KEYS
from trainer.report.journal import Entry

LOG_WIDTH = 100
# In the environment: 1 leaves to train.log what a run would print
BRIEF = "TRAIN_BRIEF"

# In a notebook rich would put an empty block of HTML before each line.
_AS_IT_IS: dict[str, Any] = dict.fromkeys(("highlight", "markup", "emoji", "force_jupyter"), False)


@final
class Screen:
    """Where a run prints: a file, or standard output, and train.log where it has a run folder.

    With a folder, and `BRIEF` in the environment, nothing but the log is written.
    """

    def __init__(self, folder: Path | None = None, *, file: TextIO | None = None) -> None:
        is_brief = folder is not None and os.environ.get(BRIEF) == "1"
        in_notebook = file is None and not is_brief and Console().is_jupyter
        style = dict(_AS_IT_IS)
        self._notebook: NotebookLine | None = None
        if in_notebook:
            # A cell shows colours, but is no terminal, and has no width to ask for.
            style |= {"force_terminal": True, "width": LOG_WIDTH}
            if folder is not None:
                self._notebook = NotebookLine()
        self._console = Console(file=file, quiet=is_brief, **style)
        is_terminal = self._console.is_interactive and self._console.file.isatty()
        self._shows_bar = is_terminal and not is_brief
        if isinstance(self._console.file, TextIOWrapper):
            # A path may hold what the terminal's encoding does not.
            self._console.file.reconfigure(errors="backslashreplace")
        # The log follows, while it is open.
        self._consoles = [self._console]
        if folder is not None:
            with as_save_error(folder / RunFolder.LOG):
                log = open_log(folder / RunFolder.LOG)
            plain = _AS_IT_IS | {"color_system": None, "force_terminal": False}
            self._consoles.append(Console(file=log, width=LOG_WIDTH, **plain))
        self._live: Live | None = None
        self._progress: Progress | None = None
        self._figures = Text(no_wrap=True, overflow="ellipsis")
        self._noun: Noun = "token"
        # Step that was shown first, and when
        self._first: tuple[int, float] | None = None

    def show(self, block: RenderableType) -> None:
        """Print a block, wrapped to the width at hand."""
        for console in self._consoles:
            _print(console, block)

    def line(
        self, text: str, style: str = "", label: str = "", *, is_command: bool = False
    ) -> None:
        """Print one line, without secrets or control codes it may quote."""
        text = printable_lines(without_secrets(f"{label}{text}", os.environ))
        for console in self._consoles:
            # A terminal breaks a line at words, but a command, which is copied whole.
            shown = at_words(text, console.file) if not is_command else text
            labelled = Text(shown, style)
            labelled.stylize("bold yellow", 0, len(label))
            _print(console, labelled, soft_wrap=True)

    def warn(self, text: str) -> None:
        """Print a warning."""
        self.line(text, label="warning: ")

    def name_checkpoint(self, loaded: Loaded | None) -> None:
        """Print which checkpoint was read, where one was, and why no newer one."""
        if loaded is not None:
            for message in loaded.messages:
                self.warn(message)
            self.line(f"reading {loaded}")

    def begin(self, step: int, steps: int, noun: Noun = "token") -> None:
        """Begin to show progress behind a step, 0 before the first; speed counts the `noun`."""
        self._noun, self._first = noun, None
        # Drawn below, with the figures; evaluations take their part in the time that is left.
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(None, complete_style="cyan"),
            TextColumn("{task.percentage:.0f}%  {task.fields[left]}"),
            console=self._console,
            expand=True,
        )
        description = step_text(step, steps)
        self._progress.add_task(description, total=steps, completed=step, left="first step")
        if self._shows_bar:
            drawn = Group(self._progress, self._figures)
            self._live = Live(drawn, console=self._console, transient=True)
            self._live.start(refresh=True)
            # A killed process cannot show a hidden cursor again.
            self._console.show_cursor(show=True)

    def step(self, entry: Entry, *, is_due: bool) -> None:
        """Show the figures of one step, on a line of its own if due, besides the bar."""
        if self._progress is None:
            return
        (task,) = self._progress.tasks
        step, steps, now = entry["step"], int(task.total or 0), time.monotonic()
        at, figures = step_text(step, steps), _figures(entry, self._noun)
        # The first step, which compiles and warms up, is not typical: it is a guess until the next.
        first, since = self._first = self._first or (step, now)
        pace_s = entry["seconds"]
        if step > first:
            pace_s = (now - since) / (step - first)
        left_s = pace_s * (steps - step)
        if self._live is not None:
            left = f"{clock(left_s)} left"
            self._progress.update(task.id, completed=step, description=at, left=left)
            self._figures.plain = figures
        if self._notebook is not None:
            self._notebook.show(step / steps, f"{at}  {figures}  {clock(left_s)} left")
        if is_due:
            # What is drawn on the screen anyway goes to the log alone.
            is_drawn = bool(self._live or self._notebook)
            for console in self._consoles[is_drawn:]:
                _write(console, f"{at}  {figures}  {clock(left_s):>5} left\n")

    def end_progress(self) -> None:
        """Take the bar away."""
        if self._live is not None:
            self._live.stop()
        self._live = self._progress = None

    def close(self) -> None:
        """Take the bar away and close the log. Closing twice does nothing."""
        self.end_progress()
        for log in self._consoles[1:]:
            log.file.close()
        del self._consoles[1:]


def show_read(loaded: Loaded, *texts: str) -> None:
    """Print what was done with a checkpoint, a line each, and which it was."""
    screen = Screen()
    screen.name_checkpoint(loaded)
    for text in texts:
        screen.line(f"{loaded.short}: {text}")
    screen.close()


def _print(console: Console, block: RenderableType, *, soft_wrap: bool = False) -> None:
    """Print and flush; training goes on without a console that is gone."""
    try:
        if console.is_terminal:
            console.print(block, soft_wrap=soft_wrap)
            console.file.flush()
        else:
            with console.capture() as captured:
                console.print(block, soft_wrap=soft_wrap)
            lines = captured.get().splitlines()
            _write(console, "".join(f"{line.rstrip()}\n" for line in lines))
    except (OSError, SystemExit) as error:  # rich turns a broken pipe into the latter
        _fall_silent(console, error)


def _write(console: Console, lines: str) -> None:
    """Print whole lines without style, past rich, which would take ten times as long."""
    if console.quiet:
        return
    try:
        console.file.write(lines)
        console.file.flush()
    except OSError as error:
        _fall_silent(console, error)


def _fall_silent(console: Console, error: BaseException) -> None:
    """Print nothing more; what is in a buffer must not break the end of the process."""
    console.quiet = True
    if isinstance(error, BrokenPipeError):
        lead_nowhere(console.file)  # type: ignore[arg-type] # of text, as rich writes


def step_text(step: int, steps: int) -> str:
    """Write a step so that those of a run are equally wide: `step  7/60`."""
    if not steps:
        return f"step {step}"
    return f"step {step:>{len(str(steps))}}/{steps}"


def figure(value: float | None) -> str:
    """Write a figure of any size with four digits: `0.8312`, `4.412e-06`."""
    if value is not None and 0 < abs(value) < 1:
        return f"{value:#.4g}"
    return loss(value)


def _figures(entry: Entry, noun: Noun) -> str:
    """Write the figures of a step, each as wide as those of other steps."""
    value = "-"
    # A step without loss terms, all of whose labels are ignored, has none.
    if entry["loss"] is not None:
        value = loss(entry["loss"])
    texts = [f"loss {value:>8}"]
    for name, found in entry.items():
        if name not in STEP_KEYS and not name.startswith((*NORMS_OF_PARAMETERS, DRAWN)):
            texts.append(f"{name} {figure(found)}")
    texts.append(f"{short(entry['tokens_per_second']):>5} {noun}s/s")
    if "mfu" in entry:
        texts.append(f"mfu {percent(entry['mfu']):>5}")
    if noun == "token":
        texts.append(f"padding {percent(entry['padding']):>5}")
    texts += [f"grad norm {rate(entry['grad_norm']):>5}", f"lr {entry['lr']:.2e}"]
    return "  ".join(texts)


@final
class NotebookLine:
    """A line below the cell; what is printed comes under it."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._next_at = 0.0

    def show(self, share: float, text: str) -> None:
        """Draw the share that is done, 0 to 1, and a text beside it, a few times a second."""
        now = time.monotonic()
        if now < self._next_at and share < 1:
            return
        self._next_at = now + 0.25
        done = round(24 * share)  # characters
        content = {"text/plain": f"{'█' * done:░<24}  {text}"}
        if self._handle is None:
            from IPython.display import display  # noqa: PLC0415 - is there in a notebook

            self._handle = display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)
