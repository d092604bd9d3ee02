"""Write the answers of held-out samples anew, and give them beside those that the data have.

Samples are written in groups that follow from their lengths alone: a text is the same for every cut
and number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, takewhile
from typing import final

from trainer.core.micro_batch import IGNORED, Fields, to_device
from trainer.core.out_of_memory import no_replay
from trainer.core.world import World
from trainer.data.collate import LABELS, pad_samples
from trainer.data.loader import Request
from trainer.data.samples import INPUT_IDS
from trainer.objectives.base import Objective
from trainer.objectives.text_output import TextOutput
from trainer.parallel.base import Parallel
from trainer.plan.cut import IntArray
from trainer.plan.lengths import Lengths
from trainer.training.data import HeldOut
from trainer.training.evaluation import forward_passes
from trainer.training.predictions import Line, lines_of_all

TOKENS_AT_ONCE = 2048  # of samples that are written together: their number, times the longest


@final
@dataclass(frozen=True, kw_only=True)
class AskedSample:
    """A sample that has an answer, parted: what is asked, and what is to be written behind it."""

    number: int  # its id
    given: Fields  # what `Objective.predict` gets of it, `(1, ...)`
    begun: Sequence[int]  # tokens that the answer goes on behind
    answer: Sequence[int]

    @classmethod
    def of(cls, objective: Objective, fields: Fields, number: int = 0) -> AskedSample | None:
        """Part a micro-batch of one sample; None where there is no answer, or no text is written.

        Where the labels are those of the tokens, the last that are learned are the answer.
        """
        ids, labels = fields.get(INPUT_IDS), fields.get(LABELS)
        if labels is None or not (objective.writes_labels or objective.predicts_next):
            return None
        given = {name: field for name, field in fields.items() if name != LABELS}
        is_learned = labels[0] != IGNORED
        if objective.writes_labels:
            answer = labels[0][is_learned].tolist()
            return cls(number=number, given=given, begun=(), answer=answer)
        # A pair of answers has two rows.
        if ids is None or ids.shape != labels.shape or ids.ndim != 2:  # noqa: PLR2004
            return None
        end = max(is_learned.nonzero().flatten().tolist(), default=-1) + 1
        begin = max((~is_learned[:end]).nonzero().flatten().tolist(), default=-1) + 1
        # Of a text all is learned, and nothing is asked.
        if not begin:
            return None
        for name, field in given.items():
            if field.shape[:2] == ids.shape:
                given[name] = field[:, :begin]
        row = ids[0].tolist()
        return cls(number=number, given=given, begun=row[:begin], answer=row[begin:end])

    @property
    def is_row(self) -> bool:
        """Whether all that is given is of its tokens, so that others can be beside it."""
        ids = self.given.get(INPUT_IDS)
        return ids is not None and all(field.shape == ids.shape for field in self.given.values())

    def reference(self, text: TextOutput) -> str | list[int]:
        """Write its answer, up to what ends it, as one that is predicted is written."""
        answer = takewhile(lambda token: token not in text.ends, self.answer)
        return text.text_behind(self.begun, [*answer])


@final
@dataclass(frozen=True, kw_only=True)
class AnswerWriter:
    """A model that writes the answers of held-out samples."""

    model: Parallel
    objective: Objective
    world: World
    text: TextOutput

    def lines(self, part: HeldOut, was_asked: Callable[[], bool]) -> list[Line]:
        """Give `id`, `label` and `prediction` of samples with an answer. Collective."""
        of_rank = partial(self._of_rank, part, was_asked)
        return lines_of_all(part, self.world, was_asked, of_rank)

    def _of_rank(
        self, part: HeldOut, was_asked: Callable[[], bool], places: IntArray
    ) -> Iterator[Line]:
        """Write the answers of this rank's groups; stops where a signal asks for it."""
        data = part.loader.dataset
        groups = _groups(places, part.lengths)[self.world.rank :: self.world.size]
        requests = (
            Request((place,), 0, int(part.lengths[place])) for group in groups for place in group
        )
        self.model.gather()
        try:
            with forward_passes(self.model, part.loader, requests, self.world) as loaded:
                for group in groups:
                    # An answer may take seconds.
                    if was_asked():
                        break
                    asked = list[AskedSample]()
                    for place, fields in zip(group, islice(loaded, len(group)), strict=True):
                        number = int(data.original_ids(place))
                        if (each := AskedSample.of(self.objective, fields, number)) is not None:
                            asked.append(each)
                    for some in self._together(asked):
                        yield from self._written(some, data.facts.pad_token_id or 0)
        finally:
            self.model.release()

    def _together(self, asked: Sequence[AskedSample]) -> Iterator[list[AskedSample]]:
        """Part the samples of a group where the shortest would wait long for others."""
        together = list[AskedSample]()
        for each in sorted(asked, key=lambda each: (len(each.begun), each.number)):
            is_far = together and len(each.begun) - len(together[0].begun) > self.text.most
            if together and (is_far or not (each.is_row and together[0].is_row)):
                yield together
                together = []
            together.append(each)
        if together:
            yield together

    def _written(self, asked: Sequence[AskedSample], pad_token_id: int) -> Iterator[Line]:
        """Write the answers of samples that are beside each other."""
        fields = asked[0].given if len(asked) == 1 else joined(asked, pad_token_id)
        with no_replay("where answers are written: set a smaller data.max_length"):
            given = to_device(fields, self.world.device)
            found = self.objective.predict(self.model.call, given, self.text)
        for each, line in zip(asked, found, strict=True):
            reference = each.reference(self.text)
            yield {"id": each.number, "label": reference, "prediction": line["prediction"]}


def joined(samples: Sequence[AskedSample], pad_token_id: int) -> Fields:
    """Put what is given of samples together, each of which `is_row`, padded at the end."""
    rows = [{name: field[0] for name, field in each.given.items()} for each in samples]
    longest = max(len(row[INPUT_IDS]) for row in rows)
    return pad_samples(rows, rows[0], longest, str, pad_token_id)


def _groups(places: IntArray, lengths: Lengths) -> list[list[int]]:
    """Part samples by their lengths into those that are loaded and written together."""
    groups: list[list[int]] = [[]]
    # The longest of a group is its last.
    for place in sorted(places.tolist(), key=lambda place: int(lengths[place])):
        if groups[-1] and (len(groups[-1]) + 1) * int(lengths[place]) > TOKENS_AT_ONCE:
            groups.append([])
        groups[-1].append(place)
    return groups
