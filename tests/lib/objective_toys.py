"""What users bring that a plan has something to say about: objectives, strategies, heads, data."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from tests.lib.run_toys import Descent, DoubleNet, Net, Rows, Squared
from trainer.accumulate.base import Computed, GradientStrategy
from trainer.core.coupling import NONE, Coupling
from trainer.core.micro_batch import Fields
from trainer.objectives.base import Objective, Sums, logits_of
from trainer.objectives.next_token import NextToken

LATE = 8


class Odd(Squared):
    """Gives something else for its sums, or for its weights, by name."""

    SUMS: ClassVar[Mapping[str, Callable[[Tensor], Any]]] = {
        "none": lambda _: None,
        "dict": lambda loss: {"squared": loss},
        "vector": lambda loss: Sums(losses={"squared": loss.repeat(3)}),
        "number": lambda loss: Sums(losses={"squared": float(loss.detach())}),
        "nothing": lambda _: Sums(losses={}),
        "detached": lambda loss: Sums(losses={"squared": loss.detach()}),
        "text metric": lambda loss: Sums(losses={"squared": loss}, metrics={"squared": "much"}),
        "unweighted": lambda loss: Sums(losses={"squared": loss, "second": loss}),
        "the step's": lambda loss: Sums(losses={"squared": loss}, metrics={"replays": 1.0}),
        "the time": lambda loss: Sums(losses={"squared": loss, "seconds": loss}),
    }
    WEIGHTS: ClassVar[Mapping[str, Any]] = {
        "none": None,
        "list": [1.0],
        "nothing": {},
        "not a number": {"squared": float("nan")},
        "negative": {"squared": -1.0},
        "infinite": {"squared": torch.tensor(float("inf"))},
        "text": {"squared": "3"},
        "vector": {"squared": torch.ones(3)},
        "never summed": {"squared": 1.0, "second": 1.0},
    }

    def __init__(self, sums: str = "", weights: str = "") -> None:
        super().__init__()
        self.given, self.counted = sums, weights

    def sums(self, model: Any, fields: Fields) -> Sums:
        found = super().sums(model, fields)
        odd = self.SUMS.get(self.given)
        return found if odd is None else odd(found.losses["squared"])

    def weights(self, fields: Fields) -> Any:
        return self.WEIGHTS.get(self.counted, super().weights(fields))


class Sometimes(Squared):
    """Gives a second term for long rows only, in one of its methods."""

    def __init__(self, method: str, longest: int = 8) -> None:
        super().__init__()
        self.method, self.longest = method, longest

    def _given(self, method: str, fields: Fields, terms: Mapping[str, Any]) -> dict[str, Any]:
        is_long = self.method != method or fields["labels"].shape[1] > self.longest
        return {**terms, **({"second": terms["squared"]} if is_long else {})}

    def weights(self, fields: Fields) -> Mapping[str, float]:
        return self._given("weights", fields, super().weights(fields))

    def sums(self, model: Any, fields: Fields) -> Sums:
        return Sums(losses=self._given("sums", fields, super().sums(model, fields).losses))


class Partly(Squared):
    """Has loss terms at late positions only: a constant where there are none, or no such term."""

    def __init__(self, otherwise: str) -> None:
        super().__init__()
        self.is_second = otherwise == "left out"

    def weights(self, fields: Fields) -> Mapping[str, float]:
        late = {"late": float((fields["labels"][:, LATE:] >= 0).sum())}
        return {**super().weights(fields), **late} if self.is_second else late

    def sums(self, model: Any, fields: Fields) -> Sums:
        counted = fields["labels"][:, LATE:] >= 0
        losses = dict(super().sums(model, fields).losses) if self.is_second else {}
        if counted.any():
            losses["late"] = model(fields)[:, LATE:].square().mean(-1)[counted].sum()
        return Sums(losses=losses or {"late": torch.zeros(())})


class Numbers(Squared):
    """Counts in a kind of number of the user's choice, losses and an undeclared metric alike."""

    KINDS: ClassVar[Mapping[str, Callable[[int], Any]]] = {
        "float": float,
        "int": int,
        "tensor": torch.tensor,
        "float32 tensor": lambda count: torch.tensor(float(count)),
        "numpy": np.float32,
        "numpy int": np.int64,
        "array": np.asarray,
    }

    def __init__(self, kind: str = "float") -> None:
        super().__init__()
        self.kind = kind

    def weights(self, fields: Fields) -> Mapping[str, Any]:
        count = self.KINDS[self.kind](int((fields["labels"] >= 0).sum()))
        return {"squared": count, "share": count}

    def sums(self, model: Any, fields: Fields) -> Sums:
        share = self.KINDS[self.kind](int((fields["labels"] > 4).sum()))
        return Sums(losses=super().sums(model, fields).losses, metrics={"share": share})


class OwnLoss(GradientStrategy):
    """Computes the loss itself, and never asks the objective."""

    def __init__(self, returns: str = "loss", goes_back: bool = True) -> None:
        self.returns, self.goes_back = returns, goes_back

    def micro_batch(self, model, objective, micro_batch, divisors, rows):
        loss = model.call(micro_batch.fields).square().sum() / 100
        if self.goes_back:
            loss.backward()
        given = {"loss": loss, "none": None, "vector": loss[None]}[self.returns]
        return Computed(loss=given)


class Marked(Rows):
    """Rows with other labels: one a token, one a row, or a column of one score."""

    KINDS: ClassVar[Mapping[str, Callable[[Tensor], Tensor]]] = {
        "tokens": lambda ids: ids > 4,
        "row": lambda ids: ids.sum().remainder(3),
        "column": lambda ids: ids[:1],
    }

    def __init__(self, kind: str = "tokens", dtype: str = "int64") -> None:
        super().__init__()
        self.kind, self.dtype = kind, getattr(torch, dtype)

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        ids = self.tokens[index]
        return {"input_ids": ids, "labels": self.KINDS[self.kind](ids).to(self.dtype)}


class Count(Objective):
    """Tells how many labels count as loss terms."""

    def weights(self, fields: Fields) -> Mapping[str, float]:
        return {"terms": 1.0}

    def sums(self, model: Any, fields: Fields) -> Sums:
        terms = (fields["labels"] != -100).sum()
        return Sums(losses={"terms": terms + 0.0 * model(fields).sum()})


class MeanHead(DoubleNet):
    """Gives the mean of its own loss, whatever count it is asked to divide by; or an odd number."""

    def __init__(self, shifts: bool = False, is_odd: bool = False) -> None:
        super().__init__()
        self.shifts, self.is_odd = shifts, is_odd

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        logits = super().forward(input_ids)
        if self.shifts:
            logits, labels = logits[:, :-1], labels[:, 1:]
        loss = nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())
        return SimpleNamespace(loss=loss * len(labels) ** 0.5 if self.is_odd else loss)


class Begun(Rows):
    """Puts a token before each row where rows are joined, and counts it."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths = self.lengths + 1

    def collate(self, samples: Sequence[Mapping[str, Tensor]]) -> Fields:
        rows = [nn.functional.pad(sample["input_ids"], (1, 0)) for sample in samples]
        pad = partial(nn.utils.rnn.pad_sequence, rows, batch_first=True)
        return {"input_ids": pad(), "labels": pad(padding_value=-100)}


class Mean(Squared):
    """Divides its sum by the samples of the micro-batch, as a loss with reduction="mean" does."""

    def sums(self, model: Any, fields: Fields) -> Sums:
        losses = super().sums(model, fields).losses
        return Sums(losses={name: loss / len(fields["labels"]) for name, loss in losses.items()})


class MeanOfTokens(NextToken):
    """Derives from a class that says that it sums, and divides as `Mean` does."""

    def sums(self, model: Any, fields: Fields) -> Sums:
        sums = super().sums(model, fields)
        losses = {name: loss / len(fields["labels"]) for name, loss in sums.losses.items()}
        return replace(sums, losses=losses)


class Pairs(Objective):
    """Pulls the two samples of a pair together; one that is left over, to zero."""

    def __init__(self, group_size: int = 2) -> None:
        self.coupling = Coupling("group", group_size) if group_size > 1 else NONE

    def weights(self, fields: Fields) -> Mapping[str, float]:
        return {"pairs": float(-(-len(fields["labels"]) // 2))}

    def sums(self, model: Any, fields: Fields) -> Sums:
        is_token = fields["labels"] >= 0
        logits = logits_of(model({"input_ids": fields["input_ids"]})).square().sum(-1)
        scores = torch.where(is_token, logits, 0.0).sum(-1)
        first, left = scores[::2], scores[1::2]
        apart = first - nn.functional.pad(left, (0, len(first) - len(left)))
        return Sums(losses={"pairs": apart.square().sum() * 1e-3})


class Loud(Squared):
    """A loss so large that its gradient in fp16 ends at a scale of a few hundred."""

    def sums(self, model: Any, fields: Fields) -> Sums:
        return Sums(losses={"squared": 10 * super().sums(model, fields).losses["squared"]})


class InBackward(Descent):
    """Steps as soon as a gradient is there, as optimizers fused into backward do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        for parameter in self.param_groups[0]["params"]:
            parameter.register_post_accumulate_grad_hook(lambda _: self.step())


class Bounded(Net):
    def forward(self, input_ids: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        return super().forward(input_ids)


class Scorer(DoubleNet):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = nn.Linear(8, 3).double()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        tokens = self.embed(input_ids) * attention_mask[..., None]
        return self.numbers(torch.tanh(tokens.sum(1)))


class Scores(Rows):
    """Numbers from 0 to 1, of which some are not known."""

    def __init__(self, whole: bool = False) -> None:
        super().__init__()
        self.whole = whole

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        draws = torch.rand(3, generator=torch.Generator().manual_seed(index)).double()
        labels = draws.round() if self.whole else draws
        labels[1 : 1 + (index % 7 == 0)] = -100.0
        return {"input_ids": self.tokens[index], "labels": labels}
