"""What several tests share: a ragged toy, a step built by hand, one table of tolerances."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainer.accumulate.base import GradientStrategy
from trainer.accumulate.sum import Sum
from trainer.core.coupling import MEAN_OF_MEANS, NONE, model_coupling, strictest
from trainer.core.world import World
from trainer.data.documents import BOS
from trainer.data.loader import Loader, Request
from trainer.models.bind import bind
from trainer.models.gpt import GPT
from trainer.objectives.base import Objective
from trainer.objectives.next_token import NextToken
from trainer.optim.optimizers import AdamW
from trainer.parallel.base import Parallel, Replicated
from trainer.parallel.setup import ParallelSetup
from trainer.parallel.sync import Deferred, SyncPolicy
from trainer.plan.batch_size import ConstantSize
from trainer.plan.cut import Cut, Layout
from trainer.plan.order import Order
from trainer.training.batches import Feed
from trainer.training.context import StepContext, StepState
from trainer.training.data import Data
from trainer.training.model import Model
from trainer.training.step import StepReport, train_step
from trainer.verify.proof import verify
from trainer.verify.report import VerifyReport

EXACT = {torch.float64: 1e-12, torch.float32: 1e-6}
"""Largest relative error of a gradient that is only cut differently, by precision."""

WRONG = 1e-3
"""What a negative control must exceed."""

VOCABULARY = 17

PLAN_KEYS = (
    *("global_batch", "unit", "world_size", "accum_steps", "micro_batches", "max_tokens"),
    *("padding", "predicted_peak_bytes", "memory_limit_bytes", "sync", "parallel", "steps"),
    "steps_per_epoch",
)
"""Of plan.json, in order."""

STEP_KEYS = (
    *("step", "epoch", "samples", "tokens", "loss", "lr", "grad_norm", "accum_steps"),
    *("micro_batches", "padding", "seconds", "tokens_per_second", "memory_bytes"),
)
"""Of a step in metrics.jsonl, in order; more where they apply."""


class RaggedText:
    """Token sequences of 1 to 23 tokens, some without a single label."""

    draws_randomness = False

    def __init__(self, num_samples: int = 40, seed: int = 0) -> None:
        numbers = np.random.default_rng(seed)
        self.lengths = numbers.integers(1, 24, size=num_samples).astype(np.int64)
        self.samples = [
            torch.from_numpy(numbers.integers(0, VOCABULARY, size=n)) for n in self.lengths
        ]
        self.masked = set(numbers.choice(num_samples, num_samples // 8, replace=False).tolist())

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        tokens = self.samples[index]
        labels = torch.full_like(tokens, -100) if index in self.masked else tokens
        return {"input_ids": tokens, "labels": labels}


class TinyLM(nn.Module):
    """A causal model in which every position sees only what is before it."""

    def __init__(self, width: int = 8, dropout: float = 0.0, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.mix = nn.GRU(width, width, batch_first=True)
        self.norm = norm or nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden, _ = self.mix(self.embed(input_ids))
        hidden = (
            self.norm(hidden.transpose(1, 2)).transpose(1, 2)
            if isinstance(self.norm, nn.BatchNorm1d)
            else self.norm(hidden)
        )
        return self.head(self.dropout(hidden))


def tiny_gpt(**options: Any) -> GPT:
    """Build a GPT in float64, of the same weights each time."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 11, "width": 12, "num_layers": 2, "num_heads": 2, "max_length": 8}
    return GPT(**sizes, **options).double()


def replicated(module: nn.Module, world: World, **how: Any) -> Parallel:
    return Replicated(module, bind(module), list(module.parameters()), world, **how)


@dataclass
class Bench:
    """One run's objects, built by hand."""

    cut: Cut
    dtype: torch.dtype = torch.float64
    global_batch: int = 16
    normalizer: str = "tokens"
    dataset: Any = field(default_factory=RaggedText)
    model: Callable[[], nn.Module] = TinyLM
    objective: Objective = field(default_factory=NextToken)
    strategy: GradientStrategy = field(default_factory=Sum)
    clip_norm: float | None = None
    seed: int = 0
    num_workers: int = 0
    layout: Layout = field(default_factory=Layout)
    world: World = field(default_factory=World)
    lay_out: Callable[..., Parallel] = replicated
    sync: SyncPolicy = field(default_factory=Deferred)
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW

    def __post_init__(self) -> None:
        torch.default_generator.manual_seed(self.seed)
        module = self.model().to(self.dtype)
        world = self.world
        layout = replace(self.layout, world_size=world.size, lockstep=self.sync.lockstep)
        lengths = self.dataset.lengths
        order = Order(len(self.dataset), self.seed, ConstantSize(global_batch=self.global_batch))
        self.loader = Loader(self.dataset, num_workers=self.num_workers, seed=self.seed)
        data = Data(order=order, lengths=lengths, loader=self.loader, total_steps=100)
        how = (self.cut, layout, world, self.seed, order.start)
        self.feed = Feed(data, self.objective, *how)
        example = self.loader.load(Request(ids=(0,), epoch=0, pad_to=int(lengths[0])))
        parallel = self.lay_out(module, world)
        optimizer = self.optimizer(module.parameters(), lr=1e-2)
        self.module = module
        model = Model(
            module=module,
            device=world.device,
            objective=self.objective,
            normalizer=self.normalizer,  # type: ignore[arg-type]
            strategy=self.strategy,
            coupling=strictest(
                model_coupling(module),
                MEAN_OF_MEANS if self.normalizer == "micro_batches" else NONE,
                self.objective.coupling,
            ),
            setup=ParallelSetup(mode="none", replicas=1, sync=self.sync),
            spec=AdamW(lr=1e-2),
            clip_norm=self.clip_norm,
        )
        self.context = StepContext(
            data=data,
            model=model,
            world=world,
            parallel=parallel,
            state=StepState.of(parallel, self.objective, world),
            terms=tuple(sorted(self.objective.weights(example))),
            optimizer=optimizer,
            base_lrs=(1e-2,),
        )

    def step(self) -> StepReport:
        """Take the next step."""
        return train_step(self.context, self.feed.next(), self.feed)

    def gradient_and_loss(self) -> tuple[dict[str, Tensor], float]:
        """Take a step; gives its gradient, caught before the update, and its loss."""
        found: dict[str, Tensor] = {}

        def keep(*_: object) -> None:
            found.update({n: p.grad.clone() for n, p in self.module.named_parameters()})

        handle = self.context.optimizer.register_step_pre_hook(keep)
        report = self.step()
        handle.remove()
        return found, float(report.loss)

    def parameters(self) -> dict[str, Tensor]:
        """Copies of the weights by name."""
        return {name: p.detach().clone() for name, p in self.module.named_parameters()}

    def verified(self, *, whole_fits: bool = True) -> VerifyReport:
        """Verify the next step; what the run itself has must come out as it went in."""
        modes = [part.training for part in self.module.modules()]
        state = {name: value.clone() for name, value in self.module.state_dict().items()}
        generator = torch.default_generator.get_state()
        report = verify(self.context, self.feed.next(), self.feed, whole_fits=whole_fits)
        assert torch.equal(torch.default_generator.get_state(), generator)
        assert modes == [part.training for part in self.module.modules()]
        assert all(torch.equal(v, state[n]) for n, v in self.module.state_dict().items())
        assert all(p.grad is None for p in self.module.parameters())
        assert report.exact == (not report.culprits)
        return report


class Failing(GradientStrategy):
    """Runs out of memory once, at one phase of one micro-batch."""

    def __init__(self, at: int, phase: str) -> None:
        self.at, self.phase, self.done = at, phase, False

    def micro_batch(self, *given):
        return Sum().micro_batch(*given)

    def walk(self, model, *given, **how):
        if self.done:
            return super().walk(model, *given, **how)
        self.done, passed = True, count(1)

        def fail(*_: object) -> None:
            if next(passed) > self.at:
                raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")

        place = model.module.register_forward_hook
        if self.phase == "backward":
            place = next(iter(model.module.parameters())).register_hook
        handle = place(fail)
        try:
            return super().walk(model, *given, **how)
        finally:
            handle.remove()


def relative_error(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Largest over tensors of the 2-norm of the difference over that of the expected one."""
    assert found.keys() == expected.keys()
    return max(
        float((found[n].double() - expected[n].double()).norm())
        / max(float(expected[n].double().norm()), 1e-30)
        for n in expected
    )


def documents_of(dataset: Any) -> list[str]:
    """The samples of a data set of bytes as text, without context and what begins and ends them."""
    samples = [dataset[i]["input_ids"].tolist()[1:] for i in range(len(dataset))]
    return [bytes(i for i in ids if i < BOS).decode("utf-8", "replace") for ids in samples]
