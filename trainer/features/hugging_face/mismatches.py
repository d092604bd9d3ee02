"""Warn of an objective, of data or of a tokenizer that do not go with a model's own files."""

from __future__ import annotations

from typing import Any, final

from trainer.assemble.features import Feature
from trainer.assemble.run_plan import RunPlan
from trainer.core.format import expanded
from trainer.models.check import vocabulary_of
from trainer.models.facts import ModelFacts, facts_of, model_library


@final
class Mismatches(Feature):
    """Compares what a run takes with what its model was made with."""

    def warnings(self, run_plan: RunPlan) -> list[str]:
        """See the base class."""
        run = run_plan.run
        module, objective, warnings = run.model.module, run.model.objective, list[str]()
        facts = facts_of(module, run.config.model.params)
        if facts.balance_loss and not (objective.is_of_model or objective.gives_rows):
            warnings.append(
                "objective: leaves out the balance loss of the model's router, "
                f"router_aux_loss_coef={facts.balance_loss:g} in its config; "
                "type objective=next_token_balanced to train with it"
            )
        known, rows = run.data.train.facts.vocab_size, vocabulary_of(module)
        if not known or not rows:
            return warnings
        # Tables are padded, but not to the double.
        if facts.source and rows >= 2 * known:
            warnings.append(
                f"data: {known} different ids, such as bytes, but the model was loaded with a "
                f"vocabulary of {rows}, in which they mean something else: give ids of the model's "
                "own tokenizer, e.g. data._target_=datasets.load_from_disk"
            )
        elif _is_foreign(run.tokenizer, facts, known, rows):
            warnings.append(
                f"tokenizer: {known} ids, but the model has {rows} rows for them, or other tokens: "
                f"it seems to be of another model, and an id from {rows} on is a data error; leave "
                "tokenizer.path out, which takes the model's own"
            )
        return warnings


def _is_foreign(tokenizer: Any, facts: ModelFacts, known: int, rows: int) -> bool:  # noqa: ANN401
    """Whether a tokenizer has more ids than a model, or other ones than the model's own."""
    folder, loaded = getattr(tokenizer, "name_or_path", None), facts.source
    is_elsewhere = loaded and folder and expanded(folder).absolute() != expanded(loaded).absolute()
    if known > rows or not is_elsewhere:
        return known > rows
    if (own := model_library().tokenizer_beside(None, loaded, ())) is None:
        return known != rows
    ids = tokenizer.get_vocab()
    return any(ids.get(token) != number for token, number in own.get_vocab().items())
