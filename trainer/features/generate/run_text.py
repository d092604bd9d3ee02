"""Read of a run what continues text: its tokenizer, its model, and how long a text may be."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from trainer.assemble.data_sets import RunTokenizer, open_data, purpose_of_model
from trainer.assemble.instantiate import look_up
from trainer.assemble.module import build_model
from trainer.assemble.objective import trained_objective
from trainer.assemble.saved import Saved, Terms
from trainer.config.data_sets import source_components
from trainer.config.run_config import RunConfig
from trainer.core.errors import ConfigError
from trainer.core.format import shown_path
from trainer.core.run_folder import RunFolder
from trainer.core.world import World
from trainer.data.samples import DataFacts
from trainer.features.generate.next_token import continue_by_forward
from trainer.models.bind import bind
from trainer.models.facts import Continuation, facts_of

BOTH = "seq2seq_lm"
"""The task of encoder-decoders, which write a text of its own and do not go on with the prompt."""

GoOn = Callable[[Continuation, Callable[[int], object]], object]
"""Continues a prompt, and calls with each token."""


def read_text(
    config: RunConfig, folder: Path, saved: Saved, world: World
) -> tuple[DataFacts, bool]:
    """Say how a run reads and writes text, unless it does not; the model is not built.

    Gives what is known of its tokens, with the `max_length` of a prompt and what follows it, and
    whether what follows does not go on with the prompt.
    """
    terms, purpose = saved.terms, purpose_of_model(config)
    _refuse_other_models(config, terms, purpose["task"])
    facts = _text_facts(config, folder, purpose, world)
    here, before = facts.vocab_size, terms.given.get("vocab_size")
    # Its files may be gone, and a tokenizer of bytes in their place.
    if here and before and here != before:
        text = f"has {here} ids here, and had {before} as the run was trained"
        raise ConfigError(f"tokenizer: {text}; type tokenizer.path=FOLDER, with that of the run")
    # What the model has or, where that is not stated, what it has learnt
    most = purpose["max_positions"] or terms.given.get("max_length") or facts.max_length
    return replace(facts, max_length=most or sys.maxsize), purpose["task"] == BOTH


def build_writer(config: RunConfig, saved: Saved, world: World) -> GoOn:
    """Build the model of a checkpoint, and give what continues prompts with it."""
    module, _ = build_model(config, world, saved.terms.given, stored=saved.stored)
    module.eval()
    return facts_of(module).continue_prompt or partial(
        continue_by_forward, bind(module), world.device
    )


def _refuse_other_models(config: RunConfig, terms: Terms, task: str | None) -> None:
    """Refuse a run whose model writes no text behind text, by what its checkpoint says of it."""
    if task in {"causal_lm", BOTH}:
        return
    what = f"a model for {task}"
    if task is None:
        objective = trained_objective(config, terms.contract, RunTokenizer(config))
        if objective.predicts_next:
            return
        what = f"a model with objective={type(objective).__name__}"
    text = "does not continue text; take a run of a language model"
    raise ConfigError(f"run={shown_path(Path(str(config.run)))}: {what} {text}")


def _text_facts(
    config: RunConfig, folder: Path, purpose: dict[str, Any], world: World
) -> DataFacts:
    """Give `prompt` and `decode` of a run's data, with what else is known of their tokens.

    A class that has a static method `text_facts` is asked for them; else the data are read.
    """
    key = "data"
    data: Any = config.data
    # Sources share the settings of a mixture, and the first one says what a text is.
    if sources := source_components(data):
        key, (first, _) = next(iter(sources.items()))
        data = first.model_copy(update={"params": {**data.params, **first.params}})
    tokenizer = RunTokenizer(config)
    kind: Any = look_up(data, key, config.trust)
    if _has_text_facts(kind):
        recorded = RunFolder(folder).record(RunFolder.PLAN).get("data_format")
        given = {**purpose, "data_format": recorded, **data.params}
        given |= tokenizer.given_to(data, key)
        names = inspect.signature(kind.text_facts).parameters
        found: DataFacts = kind.text_facts(**{n: given[n] for n in names if n in given})
    else:
        found = open_data(config, world, tokenizer).train.facts
    if found.prompt is None or found.decode is None:
        text = "has no `prompt` and `decode`, which turn text into tokens and back"
        raise ConfigError(f"data={data.label}: {text}")
    return found


def _has_text_facts(kind: Any) -> bool:  # noqa: ANN401 - a class, or a function that makes one
    """Whether a class says it, and none that derives from it turns text into tokens otherwise."""
    for each in getattr(kind, "__mro__", ()):
        if "text_facts" in vars(each):
            return True
        if not {"decode", "prompt", "facts"}.isdisjoint(vars(each)):
            return False
    return False
