"""Read of a run what continues text: its tokenizer, its model, and how long a text may be."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import final

from trainer.assemble.data_sets import purpose_of_model
from trainer.assemble.instantiate import look_up
from trainer.assemble.module import build_model
from trainer.assemble.saved import Terms, read_terms
from trainer.checkpoint.store import Loaded
from trainer.checkpoint.weights import checkpoint_weights
from trainer.config.components import AUTO_OBJECTIVE, Component
from trainer.config.run_config import RunConfig
from trainer.core.errors import ConfigError
from trainer.core.format import shown_path
from trainer.core.world import World
from trainer.features.generate.next_token import continue_by_forward
from trainer.features.generate.text_facts import text_facts
from trainer.models.bind import bind
from trainer.models.facts import Continuation, facts_of

BOTH = "seq2seq_lm"
"""The task of encoder-decoders, which write a text of its own and do not go on with the prompt."""

GoOn = Callable[[Continuation, Callable[[int], object]], object]
"""Continues a prompt, and calls with each token."""


@final
@dataclass(frozen=True, kw_only=True)
class RunText:
    """How a run's model reads and writes text."""

    encode: Callable[[str], tuple[Sequence[int], Sequence[int]]]  # see `DataFacts.prompt`
    decode: Callable[[Sequence[int]], str]
    vocab_size: int | None
    pad_token_id: int
    max_positions: int  # of a prompt and what follows it
    writes_apart: bool  # whether what it writes does not go on with the prompt


def read_text(config: RunConfig, folder: Path, loaded: Loaded, world: World) -> RunText:
    """Say how a run reads and writes text, unless it does not; the model is not built."""
    terms, purpose = read_terms(loaded), purpose_of_model(config)
    _refuse_other_models(config, terms, purpose["task"])
    facts = text_facts(config, folder, world)
    here, before = facts.vocab_size, terms.given.get("vocab_size")
    # Its files may be gone, and a tokenizer of bytes in their place.
    if here and before and here != before:
        text = f"has {here} ids here, and had {before} as the run was trained"
        raise ConfigError(f"tokenizer: {text}; type tokenizer.path=FOLDER, with that of the run")
    # What the model has or, where that is not stated, what it has learnt
    most = purpose["max_positions"] or terms.given.get("max_length") or facts.max_length
    assert facts.prompt is not None  # see `text_facts`
    assert facts.decode is not None
    return RunText(
        encode=facts.prompt,
        decode=facts.decode,
        vocab_size=facts.vocab_size,
        pad_token_id=facts.pad_token_id or 0,
        max_positions=most or sys.maxsize,
        writes_apart=purpose["task"] == BOTH,
    )


def build_writer(config: RunConfig, loaded: Loaded, world: World) -> GoOn:
    """Build the model of a checkpoint, and give what continues prompts with it."""
    given, stored = read_terms(loaded).given, checkpoint_weights(loaded)
    module, _ = build_model(config, world, given, stored=stored)
    module.eval()
    return facts_of(module).continue_prompt or partial(
        continue_by_forward, bind(module), world.device
    )


def _refuse_other_models(config: RunConfig, terms: Terms, task: str | None) -> None:
    """Refuse a run whose model writes no text behind text, by what its checkpoint says of it."""
    component: Component = config.objective
    if component.target == AUTO_OBJECTIVE:
        # Ours, which the model chose when it was trained
        chosen = terms.contract.get("objective._target_", component.target)
        component = Component(target=str(chosen), params={})
    predicts = getattr(look_up(component, "objective", config.trust), "predicts_next", False)
    if task in {"causal_lm", BOTH} or (task is None and predicts):
        return
    what = f"a model for {task}"
    if task is None:
        what = f"a model with objective={component.target.rpartition('.')[2]}"
    text = "does not continue text; take a run of a language model"
    raise ConfigError(f"run={shown_path(Path(str(config.run)))}: {what} {text}")
