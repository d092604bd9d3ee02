"""Warn of an objective, of data or of a tokenizer that do not go with a model's own files."""

from __future__ import annotations

from typing import Any, final

from trainer.assemble.features import Feature
from trainer.assemble.run_plan import RunPlan
from trainer.config.messages import first_of
from trainer.core.format import expanded
from trainer.features.hugging_face.added_tokens import KNOWN, NEW_IDS
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
        warnings += _of_added_tokens(run.tokenizer, module)
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


def _of_added_tokens(tokenizer: Any, module: Any) -> list[str]:  # noqa: ANN401 - of any class
    """Name words of `tokenizer.add` that add nothing, and rows for them that are never trained."""
    warnings, new = list[str](), getattr(tokenizer, NEW_IDS, ())
    if known := getattr(tokenizer, KNOWN, ()):
        words = first_of(known)
        warnings.append(f"tokenizer.add: {words}: in the tokenizer already, and not added")
    if not new or not hasattr(module, "get_input_embeddings"):
        return warnings
    tables = [module.get_input_embeddings(), module.get_output_embeddings()]
    frozen = list[str]()
    for name, part in module.named_modules():
        is_frozen = not any(parameter.requires_grad for parameter in part.parameters())
        if is_frozen and any(part is table for table in tables):
            frozen.append(name.rpartition(".")[2])
    if frozen:
        names = ",".join(frozen)
        warnings.append(
            f"tokenizer.add: the rows of {len(new)} new tokens are frozen, and stay the mean of "
            f"the others; to train them type adapter.modules_to_save=[{names}], or "
            f"adapter.trainable_token_indices=[{','.join(map(str, new))}]"
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
