"""`train generate`: continue a prompt, or one for each line of stdin, with the model of a run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import final

import torch

from trainer.accumulate.base import seed_draws
from trainer.checkpoint.weights import load_step
from trainer.config.run_config import RunConfig
from trainer.core.errors import ConfigError, TrainError
from trainer.core.format import lead_nowhere
from trainer.core.world import World, rng_key
from trainer.data.samples import faults_of
from trainer.features.generate.run_text import GoOn, RunText, build_writer, read_text
from trainer.features.generate.written_text import WrittenText
from trainer.models.facts import Continuation
from trainer.report.console import Screen

LEAST_TEMPERATURE = 1e-4
"""Below it each token is the likeliest: a quotient of logits might not be finite."""


@final
@dataclass(frozen=True)
class Prompt:
    """A text that is to be continued."""

    text: str
    tokens: list[int]
    ends: set[int]


def generate_run(config: RunConfig, folder: Path, world: World, stop: Callable[[], bool]) -> int:
    """Write what follows each prompt onto stdout, as it comes; all else goes to stderr.

    Only the checkpoint and the tokenizer are read, unless the data are of a class of one's own.
    """
    if not world.is_main:
        return 0
    loaded, screen = load_step(folder, config.step), Screen(file=sys.stderr)
    run_text = read_text(config, folder, loaded, world)
    left_out = list[TrainError]()

    def leave_out(error: TrainError) -> None:
        # Of many lines the others are continued.
        if config.prompt is not None:
            raise error
        left_out.append(error)
        screen.warn(str(error))

    prompts = _encoded(_texts(config.prompt, screen), run_text, leave_out)
    # Before a large model is built: the first prompt may be none.
    first = next(prompts, None)
    if first is None and left_out:
        return left_out[0].exit_code
    if first is None:
        raise ConfigError("prompt: stdin has no line with a text; type prompt='...'")
    screen.name_checkpoint(loaded)
    go_on = build_writer(config, loaded, world)
    seed_draws(rng_key(config.seed, "generate"), world.device)
    with _stdout(), torch.no_grad():
        for prompt in chain([first], prompts):
            if config.prompt is None:
                screen.line(f"> {prompt.text}")
            _write(config, prompt, run_text, go_on, screen)
    screen.close()
    if left_out:
        return left_out[0].exit_code
    return 0


def _write(
    config: RunConfig, prompt: Prompt, run_text: RunText, go_on: GoOn, screen: Screen
) -> None:
    """Write what follows a prompt, and a line break."""
    begin, limit = prompt.tokens, run_text.max_positions
    room = limit - len(begin)
    if run_text.writes_apart:
        begin, room = [], limit
    wanted, temperature = config.generate.tokens, config.generate.temperature
    if temperature < LEAST_TEMPERATURE:
        temperature = 0.0
    asked = Continuation(
        prompt=prompt.tokens,
        ends=prompt.ends,
        most=min(wanted, room),
        temperature=temperature,
        vocab_size=run_text.vocab_size,
        pad_token_id=run_text.pad_token_id,
    )
    written = WrittenText(run_text.decode, begin, sys.stdout)
    go_on(asked, written.put)
    if written.end() == room < wanted:
        screen.line(f"ends after {room} tokens, with the model's {limit} positions")


def _texts(typed: str | None, screen: Screen) -> Iterator[tuple[str, str]]:
    """Give each prompt behind the place where it stands: the one that was typed, or lines."""
    if typed is not None:
        yield "prompt", typed
        return
    if sys.stdin is None or sys.stdin.isatty():
        raise ConfigError("prompt: needs a text, as in prompt='Once upon', or lines on stdin")
    screen.line("reading prompts from stdin, one a line")
    for number, line in enumerate(sys.stdin.buffer, 1):
        # Whatever is no text is named with what was typed.
        text = line.decode(errors="surrogateescape").rstrip("\r\n")
        if text.strip():
            yield f"line {number} of stdin", text


def _encoded(
    texts: Iterator[tuple[str, str]], run_text: RunText, left_out: Callable[[TrainError], object]
) -> Iterator[Prompt]:
    """Turn each text into tokens; calls with the fault of one that cannot be continued."""
    for place, text in texts:
        try:
            yield _encode(place, text, run_text)
        except TrainError as error:
            left_out(error)


def _encode(place: str, text: str, run_text: RunText) -> Prompt:
    """Turn a text into tokens that leave room for one that follows."""
    most = run_text.max_positions - 1
    if not text.strip():
        raise ConfigError(f"{place}: is empty; type a text to continue")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{place}: is not UTF-8") from None
    with faults_of(f"`prompt` of the data for {place}"):
        tokens, ends = run_text.encode(text)
    if not 0 < len(tokens) <= most:
        raise ConfigError(
            f"{place}: {text!r:.40} has {len(tokens)} tokens; 1 to {most} leave room for one "
            "that follows"
        )
    return Prompt(text, [*map(int, tokens)], {*ends})


@contextmanager
def _stdout() -> Iterator[None]:
    """Write there whatever a terminal's encoding lacks, and end where nobody reads any more."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        yield
    except BrokenPipeError:
        lead_nowhere(sys.stdout)
