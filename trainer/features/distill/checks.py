"""Refuse a teacher whose tokens or classes are not those of the run."""

from __future__ import annotations

from typing import Any, final

from trainer.assemble.data_sets import source_of_model
from trainer.assemble.features import Feature
from trainer.assemble.run import Run
from trainer.config.validate import from_plain
from trainer.core.errors import ConfigError
from trainer.core.hub_cache import weights_path
from trainer.core.run_folder import RunFolder
from trainer.models.facts import facts_of, model_library
from trainer.models.frozen import frozen_of


@final
class TeacherOfRun(Feature):
    """Compares a teacher with what the run trains on."""

    def check(self, run: Run) -> None:
        """See the base class; what is not known of one of them is not compared."""
        teacher, frozen = getattr(run.model.objective, "teacher", None), frozen_of(run.model.module)
        if frozen is None or not isinstance(teacher, str):
            return
        option, _ = facts_of(run.model.module).objective(run.example) or ("next_token", "")
        if option not in {"next_token", "classify", "token_classify", "multiple_choice"}:
            text = f"the model is made for {option}, which it does not compute"
            raise ConfigError(f"objective=distill: {text}; take a causal model, or a classifier")
        place = f"objective.teacher={teacher}"
        named = getattr(getattr(frozen, "config", None), "id2label", None) or {}
        own = ", ".join(run.data.train.facts.label_names or ())
        theirs = ", ".join(str(named[number]) for number in sorted(named))
        # So the first of classes without names is called.
        is_named = own and theirs and named.get(0) != "LABEL_0"
        if is_named and own.casefold() != theirs.casefold():
            there = f"its classes are {theirs}, and those of the data {own}"
            raise ConfigError(f"{place}: {there}; take one of the same classes in the same order")
        if _has_other_ids(run.tokenizer, teacher):
            raise ConfigError(f"{place}: has other tokens; take a teacher of the same tokenizer")


def _has_other_ids(tokenizer: Any, teacher: str) -> bool:  # noqa: ANN401 - of any class
    """Whether the teacher's tokenizer gives a token another id than that of the run."""
    if not hasattr(tokenizer, "get_vocab"):
        return False
    source: str | None = str(weights_path(teacher))
    if stored := RunFolder(weights_path(teacher)).config():
        config = from_plain(stored)
        source = config.tokenizer.params.get("path") or source_of_model(config)
    if (theirs := model_library().tokenizer_beside(None, source, ())) is None:
        return False
    ids = tokenizer.get_vocab()
    return any(ids.get(token) != number for token, number in theirs.get_vocab().items())
