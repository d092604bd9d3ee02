"""Write a sample as the model gets it: decoded, with what is learned in brackets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import final

from trainer.core.micro_batch import IGNORED, Fields
from trainer.data.collate import LABELS, WEIGHT
from trainer.data.samples import INPUT_IDS

Decode = Callable[[Sequence[int]], str]


@final
@dataclass(frozen=True)
class ShownSample:
    """One sample, collated alone."""

    fields: Fields
    decode: Decode
    names: Sequence[str] | None  # of classes
    terms: list[bool] | None  # which tokens are loss terms, where labels are of tokens

    def text(self) -> str:
        """Write it out."""
        ids, labels = self.fields.get(INPUT_IDS), self.fields.get(LABELS)
        if self.terms is not None and ids is not None and labels is not None:
            return "".join(self._marked(ids.flatten().tolist(), labels.flatten().tolist()))
        if ids is None:
            forms = list[str]()
            for name, field in self.fields.items():
                if name != LABELS:
                    forms.append(f"{name} {tuple(field.shape[1:])}")
            given = ", ".join(forms)
        else:  # one row, or one for each of several choices
            given = "\n".join(map(self.decode, ids.reshape(-1, ids.shape[-1]).tolist()))
        return " -> ".join(filter(None, [given, self.learned()]))

    def _marked(self, ids: list[int], labels: list[int]) -> Iterator[str]:
        """Give runs of tokens of one weight; of tokens with classes each one with its class."""
        assert self.terms is not None  # see `text`
        end, before, often = 0, "", self.fields.get(WEIGHT)
        weights = [1.0] * len(ids)
        if often is not None and often.numel() == len(ids):
            weights = often.flatten().tolist()
        keys = zip(self.terms, weights, range(len(ids)), strict=True)
        for (is_term, weight, *_), run in groupby(keys, lambda key: key if self.names else key[:2]):
            end += len(list(run))
            # Of the whole so far: what stands alone may be decoded without the space before it.
            whole = self.decode(ids[:end])
            text, before = whole[len(before) :], whole
            if is_term:
                name = f"={self._class(labels[end - 1])}" if self.names else ""
                text = f"[[{text}{name}]]" + f"*{weight:g}" * (weight != 1)
            yield text

    def learned(self) -> str | None:
        """Give the class by its name, the target of an encoder-decoder, or numbers."""
        if (labels := self.fields.get(LABELS)) is None:
            return self._span()
        values = labels.flatten().tolist()
        if labels.dim() > 1 and not labels.is_floating_point() and INPUT_IDS in self.fields:
            target = [value for value in values if value != IGNORED]
            return f"[[{self.decode(target)}]]"
        shown = [*map(self._class, values)]
        if labels.is_floating_point() and len(self.names or ()) == len(values):
            shown = [*map(" ".join, zip(self.names or (), shown, strict=True))]
        return f"[[{', '.join(shown)}]]"

    def _span(self) -> str | None:
        """Give the tokens of the answer to a question about a context."""
        begin, end = self.fields.get("start_positions"), self.fields.get("end_positions")
        if begin is None or end is None or INPUT_IDS not in self.fields:
            return None
        answer = self.fields[INPUT_IDS].flatten()[int(begin) : int(end) + 1]
        return f"[[{self.decode(answer.tolist())}]]"

    def _class(self, label: float) -> str:
        """Name a class; else write the number."""
        known = self.names or ()
        if isinstance(label, int) and 0 <= label < len(known):
            return known[label]
        return f"{label:g}"
