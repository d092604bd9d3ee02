"""Predict every record of some data, whose labels do not matter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, final

import torch

from trainer.config.messages import clip
from trainer.core.errors import ConfigError, DataError, DoesNotFitError, TrainError
from trainer.core.format import plural
from trainer.core.micro_batch import Fields, to_device
from trainer.core.out_of_memory import AllocationGuard, release_memory
from trainer.core.user_code import described
from trainer.core.world import World
from trainer.data.files import progress
from trainer.data.loader import Loader, Request
from trainer.data.samples import DataRecord
from trainer.objectives.base import Objective
from trainer.objectives.text_output import TextOutput
from trainer.parallel.base import Parallel
from trainer.training.evaluation import inference
from trainer.training.predictions import loss_of, named_classes

RECORDS_AT_ONCE = 1024  # between two exchanges of what the ranks found
MOST_CHANCES = 20  # classes whose chances are all written; of more the likeliest few
LIKELIEST = 5

_ERROR = "error"

Values = Mapping[str, Any]


@final
@dataclass(frozen=True, kw_only=True)
class RecordPredictor:
    """A trained model, what is read off its outputs, and the samples it gets."""

    model: Parallel  # whole on every rank
    objective: Objective
    loader: Loader
    world: World
    names: Sequence[str] | None  # of the classes, in their order
    most_tokens: int  # of samples that are computed together
    text: TextOutput  # how text is written

    def lines(self) -> Iterator[dict[str, Any]]:
        """Give the line of each record, in their order. Collective.

        Samples are computed together where their fields have one shape, so that nothing is padded.
        Gives `id`, the number of the record; `source`, where it is from; what the objective
        predicts, classes by their names, or the `loss` and its `terms`; or an `error`, where it is
        no sample or cannot be read. A DataError where no sample can be.
        """
        data, is_any = self.loader.dataset, False
        first_fault: str | None = None
        records, label = data.records(), f"predicting {plural(len(data), 'sample')}"
        with inference(self.model, self.world), closing(self.loader), progress(label) as advance:
            while window := [*islice(records, RECORDS_AT_ONCE)]:
                places = list[int]()
                for record in window:
                    places += record.samples
                found = dict[int, Values]()
                for each in self.world.on_all(partial(self._share, places, advance)):
                    found.update(each)
                for values in found.values():
                    is_any |= _ERROR not in values
                    first_fault = first_fault or values.get(_ERROR)
                yield from (self._line(record, found) for record in window)
        # What is wrong is the data as a whole: the file stays as it was.
        if first_fault is not None and not is_any:
            raise DataError(f"data: {first_fault}")

    def _share(
        self, places: Sequence[int], advance: Callable[[], None]
    ) -> list[tuple[int, Values]]:
        """Compute this rank's share of some samples."""
        lengths = self.loader.dataset.lengths
        by_length = sorted(places, key=lambda place: int(lengths[place]))
        own = by_length[self.world.rank :: self.world.size]
        found = list[tuple[int, Values]]()
        for some, loaded in self._together(own):
            advance()
            if isinstance(loaded, DataError):
                found.append((some[0], {_ERROR: str(loaded).removeprefix("data: ")}))
            else:
                found += zip(some, self._predicted(loaded), strict=True)
        return found

    def _loaded(self, places: Sequence[int]) -> Iterator[Fields | DataError]:
        """Load samples one by one; gives what is wrong with those that cannot be read."""
        lengths, begin = self.loader.dataset.lengths, 0
        while begin < len(places):
            requests = (Request((place,), 0, int(lengths[place])) for place in places[begin:])
            try:
                with closing(self.loader.stream(requests)) as stream:
                    for fields in stream:
                        begin += 1
                        yield fields
            except DataError as error:
                # It ends the stream: those behind it are asked for anew.
                begin += 1
                yield error

    def _together(
        self, places: Sequence[int]
    ) -> Iterator[tuple[list[int], list[Fields] | DataError]]:
        """Load samples, and group those that are a row each of the same shapes."""
        lengths, group, waiting = self.loader.dataset.lengths, list[int](), list[Fields]()
        for place, fields in zip(places, self._loaded(places), strict=True):
            if isinstance(fields, DataError):
                yield [place], fields
                continue
            is_full = (len(group) + 1) * int(lengths[place]) > self.most_tokens
            if group and (is_full or _row_shapes(fields) != _row_shapes(waiting[0])):
                yield group, waiting
                group, waiting = [], []
            group.append(place)
            waiting.append(fields)
        if group:
            yield group, waiting

    def _predicted(self, samples: Sequence[Fields]) -> Sequence[Values]:
        """Predict samples of one shape, at once or, where memory runs out, one by one."""
        joined = {name: torch.cat([each[name] for each in samples]) for name in samples[0]}
        shapes = ", ".join(f"{name} {tuple(field.shape)}" for name, field in joined.items())
        try:
            with AllocationGuard() as guard:
                fields = to_device(joined, self.world.device)
                found: object = self.objective.predict(self.model.call, fields, self.text)
        except TrainError:
            raise
        except Exception as error:
            # It took those of the run, and these may be of another kind.
            text = f"the model cannot take them ({shapes}): {described(error)}"
            raise ConfigError(f"data: {text}; type data as the run had them") from error
        if guard.failed and len(samples) == 1:
            raise DoesNotFitError(f"predict: no memory for one sample of {shapes}")
        if guard.failed:
            release_memory()
            return [self._predicted([each])[0] for each in samples]
        if isinstance(found, Sequence) and not found:
            return [*map(self._loss_of, samples)]
        return self._checked(found, len(samples))

    def _checked(self, found: object, count: int) -> Sequence[Values]:
        """Refuse what an objective of one's own gives that is no prediction for each sample."""
        checked = list[Values]()
        for each in found if isinstance(found, Sequence) else ():
            if isinstance(each, Mapping) and "prediction" in each:
                checked.append(dict(zip(each, map(_plain, each.values()), strict=True)))
        if len(checked) != count:
            kind = type(self.objective).__name__
            raise ConfigError(
                f"objective={kind}: `predict` has to give a mapping with `prediction` for each of "
                f"{plural(count, 'sample')}, and gave {clip(repr(found))}"
            )
        return checked

    def _loss_of(self, sample: Fields) -> Values:
        """Give the loss of a sample, where an objective predicts nothing else."""
        try:
            return loss_of(self.objective, self.model.call, sample, self.world.device)
        except Exception as error:
            kind, why = type(self.objective).__name__, described(error)
            if isinstance(error, TrainError):
                why = str(error)
            raise ConfigError(
                f"objective={kind}: predicts nothing, and has no loss without labels ({why}); "
                "give it a method `predict` (docs/how-to/own/objective.md)"
            ) from error

    def _line(self, record: DataRecord, found: Mapping[int, Values]) -> dict[str, Any]:
        line: dict[str, Any] = {"id": record.number}
        if record.place is not None:
            line["source"] = record.place
        parts, why_none = [found[place] for place in record.samples], record.why_none
        for part in parts:
            why_none = part.get(_ERROR) or why_none
        if why_none is not None:
            why = why_none.removeprefix(f"{record.place}: ")
            return {**line, "prediction": None, _ERROR: why}
        values = dict(_joined(parts))
        names = record.classes or self.names
        if "prediction" in values:
            values["prediction"] = named_classes(values["prediction"], names)
            if record.reference is not None:
                values["label"] = _labelled(record.reference, values["prediction"], names)
        if record.text is not None and "start" in values:
            values |= _answer_in(record.text, values["start"], values["end"])
        if (chances := values.get("probabilities")) is not None:
            values["probabilities"] = _named_chances(chances, names)
        return {**line, **_shortened(values)}


def _row_shapes(fields: Fields) -> object:
    """Give what samples have in common that may be joined; what is no row is joined with none."""
    shapes = list[tuple[str, torch.Size, torch.dtype]]()
    for name, field in fields.items():
        # As a data set's own `collate` may give it
        if field.shape[:1] != (1,):
            return object()
        shapes.append((name, field.shape, field.dtype))
    return shapes


def _joined(values: Sequence[Values]) -> Values:
    """Join what was found of the samples of a record: their losses, over the terms of all."""
    if len(values) == 1:
        return values[0]
    total, terms = 0.0, 0
    for each in values:
        terms += each["terms"]
        if each["terms"]:
            total += each["loss"] * each["terms"]
    if not terms:
        return {"loss": None, "terms": 0}
    return {"loss": total / terms, "terms": terms}


def _labelled(reference: Any, prediction: Any, names: Sequence[str] | None) -> Any:  # noqa: ANN401
    """Write a reference as its prediction is written: of a text that was cut, as many tags."""
    if isinstance(reference, list) and isinstance(prediction, list):
        reference = reference[: len(prediction)]
    return named_classes(reference, names)


def _answer_in(text: str, start: int, end: int) -> dict[str, Any]:
    """Give an answer as its text has it, and where; some tokens begin with a blank."""
    answer = text[start:end]
    start += len(answer) - len(answer.lstrip())
    answer = answer.strip()
    return {"prediction": answer, "start": start, "end": start + len(answer)}


def _named_chances(chances: Sequence[float], names: Sequence[str] | None) -> dict[str, float]:
    """Give the chance of each class by its name or number; of many classes the likeliest."""
    numbers = [*range(len(chances))]
    if len(numbers) > MOST_CHANCES:
        numbers = sorted(numbers, key=lambda number: -chances[number])[:LIKELIEST]
    return {str(named_classes(number, names)): chances[number] for number in numbers}


def _shortened(value: Any) -> Any:  # noqa: ANN401 - any JSON
    """Round to the seven digits that fp32 has, which those that share a forward do not change."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, Mapping):
        return {name: _shortened(each) for name, each in value.items()}
    if isinstance(value, list):
        return [*map(_shortened, value)]
    return value


def _plain(value: object) -> object:
    """Turn a tensor into what stands in a line of JSON."""
    return value.tolist() if isinstance(value, torch.Tensor) else value
