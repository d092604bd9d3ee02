"""`train generate`: continue a prompt, or one for each line of stdin, with the model of a run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path

import torch

from trainer.accumulate.base import seed_draws
from trainer.assemble.saved import Saved
from trainer.checkpoint.weights import load_step
from trainer.config.run_config import RunConfig
from trainer.core.errors import ConfigError, TrainError
from trainer.core.format import lead_nowhere
from trainer.core.world import World, rng_key
from trainer.data.samples import DataFacts, faults_of
from trainer.features.generate.run_text import build_writer, read_text
from trainer.features.generate.written_text import WrittenText
from trainer.models.facts import Continuation
from trainer.report.console import Screen


def generate_run(config: RunConfig, folder: Path, world: World, stop: Callable[[], bool]) -> int:
    """Write what follows each prompt onto stdout, as it comes; all else goes to stderr.

    Only the checkpoint and the tokenizer are read, unless the data are of a class of one's own.
    """
    if not world.is_main:
        return 0
    loaded, screen = load_step(folder, config.step), Screen(file=sys.stderr)
    saved = Saved.read(config, loaded, world)
    facts, writes_apart = read_text(config, folder, saved, world)
    left_out = list[TrainError]()
    encode = partial(_encode, config, facts, writes_apart=writes_apart)
    prompts = _encoded(config.prompt, encode, screen, left_out)
    # Before a large model is built: the first prompt may be none.
    first = next(prompts, None)
    if first is None and left_out:
        return left_out[0].exit_code
    if first is None:
        raise ConfigError("prompt: stdin has no line with a text; type prompt='...'")
    screen.name_checkpoint(loaded)
    go_on, decode = build_writer(config, saved, world), facts.decode
    assert decode is not None  # see `read_text`
    seed_draws(rng_key(config.seed, "generate"), world.device)
    with _stdout(), torch.no_grad():
        for text, asked in chain([first], prompts):
            if config.prompt is None:
                screen.line(f"> {text}")
            begun = () if writes_apart else asked.prompt
            written = WrittenText(decode, begun, sys.stdout)
            go_on(asked, written.put)
            if written.end() == asked.most < config.generate.tokens:
                limit = f"the model's {facts.max_length} positions"
                screen.line(f"ends after {asked.most} tokens, with {limit}")
    screen.close()
    if left_out:
        return left_out[0].exit_code
    return 0


def _encoded(
    typed: str | None,
    encode: Callable[[str, str], Continuation],
    screen: Screen,
    left_out: list[TrainError],
) -> Iterator[tuple[str, Continuation]]:
    """Give each text with its tokens; of many lines those that cannot be continued are noted."""
    for place, text in _texts(typed, screen):
        try:
            yield text, encode(place, text)
        except TrainError as error:
            if typed is not None:
                raise
            left_out.append(error)
            screen.warn(str(error))


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


def _encode(
    config: RunConfig, facts: DataFacts, place: str, text: str, *, writes_apart: bool
) -> Continuation:
    """Turn a text into tokens that leave room for one that follows."""
    assert facts.prompt is not None  # see `read_text`
    assert facts.max_length is not None
    if not text.strip():
        raise ConfigError(f"{place}: is empty; type a text to continue")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{place}: is not UTF-8") from None
    with faults_of(f"`prompt` of the data for {place}"):
        tokens, ends = facts.prompt(text)
    room = facts.max_length - len(tokens)
    if room < 1 or not tokens:
        raise ConfigError(
            f"{place}: {text!r:.40} has {len(tokens)} tokens; 1 to {facts.max_length - 1} leave "
            "room for one that follows"
        )
    if writes_apart:
        room = facts.max_length
    return Continuation(
        prompt=[*map(int, tokens)],
        ends={*ends},
        most=min(config.generate.tokens, room),
        # Near 0 a quotient of logits might not be finite: there each token is the likeliest.
        temperature=round(config.generate.temperature, 4),
        vocab_size=facts.vocab_size,
        pad_token_id=facts.pad_token_id or 0,
    )


@contextmanager
def _stdout() -> Iterator[None]:
    """Write there whatever a terminal's encoding lacks, and end where nobody reads any more."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        yield
    except BrokenPipeError:
        lead_nowhere(sys.stdout)
