"""Find where an answer begins and ends in a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.core.errors import ConfigError
from trainer.core.micro_batch import IGNORED, Fields, output_part
from trainer.data.collate import WEIGHT
from trainer.data.samples import CHARACTERS
from trainer.objectives.base import ModelCall, Objective, Sums, at_least_single
from trainer.objectives.text_output import TextOutput
from trainer.objectives.weighting import count_of, weight_of, weighted

ENDS = ("start", "end")


@final
@dataclass(frozen=True, kw_only=True)
class QuestionAnswering(Objective):
    """Half the cross entropy of the first token of an answer, and half that of its last.

    The data give `start_positions` and `end_positions`, `(batch,)`; one outside of the sample, such
    as -100, is no loss term. Padding is no place for an answer: the loss does not depend on it. The
    metric is `exact_match`.
    """

    metric_names = ("exact_match",)
    sums_samples = True

    def weights(self, fields: Fields) -> Mapping[str, float]:
        """Count the positions."""
        first, last = _targets(fields)
        weight = weight_of(fields, first)
        both = count_of(first.where(last != IGNORED, IGNORED), weight)
        ends = {"start": count_of(first, weight), "end": count_of(last, weight)}
        return {**ends, "exact_match": both}

    def predictions(self, output: Any, fields: Fields) -> Sequence[tuple[Any, Any]]:  # noqa: ANN401
        """Give the first and the last token of each answer."""
        places = list[Tensor]()
        for end in ENDS:
            logits = _without_padding(output_part(output, f"{end}_logits"), fields)
            places.append(logits.argmax(-1))
        found = torch.stack(places, dim=-1)
        labels = torch.stack(_targets(fields), dim=-1)
        return [*zip(labels.tolist(), found.tolist(), strict=True)]

    def predict(
        self, model: ModelCall, fields: Fields, text: TextOutput
    ) -> Sequence[Mapping[str, Any]]:
        """Give the likeliest answer of each sample, empty where the first token stands for none.

        With it come its first character and the one behind its last, where the data say which
        characters of the context a token stands for.
        """
        chances = [logits.softmax(-1) for logits in _end_logits(model, fields)]
        (begins, ends), found = map(fields.get, CHARACTERS), list[dict[str, Any]]()
        for i, ids in enumerate(fields["input_ids"]):
            may_answer = torch.ones_like(ids, dtype=torch.bool)
            if begins is not None:
                may_answer = begins[i] >= 0
            # By its first token and its last, which is not before it.
            both = torch.outer(chances[0][i], chances[1][i])
            is_answer = torch.outer(may_answer, may_answer).triu()
            is_answer[0, 0] = True
            chance, place = both.masked_fill(~is_answer, -1.0).flatten().max(-1)
            first, last = divmod(int(place), len(ids))
            line = {"prediction": "", "probability": float(chance)}
            if last:
                line["prediction"] = text.text_behind((), ids[first : last + 1].tolist())
            if last and begins is not None and ends is not None:
                line |= {"start": int(begins[i, first]), "end": int(ends[i, last])}
            found.append(line)
        return found

    def sums(self, model: ModelCall, fields: Fields) -> Sums:
        """Sum over the batch, in float32 at least.

        Raises:
            ConfigError: the model gives no `start_logits` and `end_logits`, `(batch, time)`.
        """
        targets, losses, hits = _targets(fields), {}, []
        weight = weight_of(fields, targets[0])
        for end, logits, target in zip(ENDS, _end_logits(model, fields), targets, strict=True):
            entropy = F.cross_entropy(logits, target, ignore_index=IGNORED, reduction="none")
            # Each is divided by its own count of positions: the loss is the mean of both means.
            losses[end] = weighted(entropy, weight).sum() / len(ENDS)
            hits.append(logits.argmax(-1) == target)
        right = weighted(hits[0] & hits[1], weight).sum()
        return Sums(losses=losses, metrics={"exact_match": right})


def _end_logits(model: ModelCall, fields: Fields) -> list[Tensor]:
    """Run the model; gives the logits of the first and of the last token, `(batch, time)` each."""
    inputs, shape = dict(fields), tuple(fields["input_ids"].shape)
    for name in fields:
        # With positions heads would compute a loss of their own.
        if name.endswith("_positions") or name in {*CHARACTERS, WEIGHT}:
            inputs.pop(name)
    output, found = model(inputs), list[Tensor]()
    for end in ENDS:
        logits = output_part(output, f"{end}_logits")
        if not isinstance(logits, Tensor) or logits.shape != shape:
            raise ConfigError(
                f"model: forward returned a {type(output).__name__} without {end}_logits of "
                f"shape {shape}: objective=question_answering needs start_logits and end_logits, "
                "(batch, time)"
            )
        found.append(_without_padding(at_least_single(logits), fields))
    return found


def _without_padding(logits: Tensor, fields: Fields) -> Tensor:
    """Leave no chance to padding."""
    if "attention_mask" not in fields:
        return logits
    return logits.masked_fill(fields["attention_mask"] == 0, -torch.inf)


def _targets(fields: Fields) -> list[Tensor]:
    """Give the positions of both ends, -100 where they are outside of their sample."""
    names = [f"{end}_positions" for end in ENDS]
    missing = [name for name in names if name not in fields]
    if missing:
        raise ConfigError(
            f"objective=question_answering: the data give no {' and no '.join(missing)} (they "
            f"give: {', '.join(fields)})"
        )
    ids = fields["input_ids"]
    lengths: Tensor | int = ids.shape[1]
    # Padding is on the right: a sample ends where its mask does.
    if "attention_mask" in fields:
        lengths = fields["attention_mask"].sum(-1)
    found = list[Tensor]()
    for name in names:
        at = fields[name].reshape(len(ids)).long()
        # As in the heads of the library: a position outside of the sample is no loss term.
        found.append(at.masked_fill((at < 0) | (at >= lengths), IGNORED))
    return found
