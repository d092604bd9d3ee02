"""Useful tokens per second on documents of very different lengths, ours beside other trainers.

    python benchmarks/ragged.py [--lengths 512,2048] [--steps 3] [--rounds 3] [--only ours,composer]
                                [--exact 512,2048] [--trained 20] [--threads 2] [--width 256]
                                [--layers 4] [--heads 4] [--json FILE]

Every trainer takes the same optimizer steps of 64 documents of the Python standard library, with
the same model, weights, loss and AdamW, in one process; what is not installed is a row that says
so (`pip install '.[peers]'`). Rounds are interleaved. The clock runs from the first forward of a
training to the end of its last optimizer step. `ours` is what `accum=auto` does: the real tuner,
timed afresh, then the real feed and step.

`no padding` is what could be reached at best: the tokens of every step, sorted by document length
and filled up to the same cap, in micro-batches whose rows are made equally long, run by a loop that
does nothing else. It computes the tokens of the step and nothing more, in the fewest micro-batches.
`ours, packed` computes no padding either, on the documents as they are: end to end, attention one
document at a time.

The last columns are exactness. Gradient of the first step in float64 against one padded whole
batch, as a relative 2-norm; what AdamW then makes of it, as the difference of the weights over the
length of the update; and both under bfloat16 autocast, over what the whole batch in one piece
itself loses to bfloat16 (1.0 is rounding noise and nothing more). Weights are those after
`--trained` steps, since at random weights all documents pull in the same direction and hide errors.
"""

from __future__ import annotations

import argparse
import copy
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

import torch
from common import FOLDER, Figures, Mark, Timing, print_table, write_results
from peers import PEERS, Task, hand_loop, summed_loss
from torch import Tensor, nn

from trainer.assemble.build import assemble
from trainer.assemble.run import Run
from trainer.assemble.run_plan import RunPlan, prepare
from trainer.assemble.step import step_context
from trainer.cli.compose import Composer
from trainer.cli.prepare import prepare_run
from trainer.core.world import World
from trainer.data.samples import Sample
from trainer.models.recompute import checkpoint_blocks
from trainer.training.batches import Feed
from trainer.training.step import train_step

GLOBAL, MICRO = 64, 8
OURS, PACKED, IDEAL = "ours", "ours, packed", "no padding"

Gradient = Mapping[str, Tensor]


@final
@dataclass
class Watch:
    """Looks at a training from outside, alike for every trainer.

    The optimizer is read behind its step: trainers that hand it a closure have not finished the
    gradient before.

    Attributes:
        num_steps: optimizer steps to come.
        positions: computed so far, padding counted.
        micro_batches: forwards so far.
        timing: set by the last step.
        gradient: of the first step, where it is kept.
        weights: after the first step, likewise.
    """

    num_steps: int
    keeps: bool = False
    positions: int = 0
    micro_batches: int = 0
    steps: int = 0
    began: Mark | None = None
    timing: Timing | None = None
    gradient: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Begin to watch."""
        model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        optimizer.register_step_post_hook(lambda *_: self._after_step(model))

    def _before_forward(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.began = self.began or Mark.now()
        self.positions += (args[0] if args else kwargs["input_ids"]).numel()
        self.micro_batches += 1

    def _after_step(self, model: nn.Module) -> None:
        self.steps += 1
        if self.keeps and self.steps == 1:
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                self.gradient[name] = parameter.grad.double().clone()
                self.weights[name] = parameter.detach().double().clone()
        if self.steps == self.num_steps:
            assert self.began is not None
            self.timing = Timing.between(self.began, Mark.now())


@final
@dataclass(frozen=True, kw_only=True)
class Setting:
    """Everything at one maximal length.

    Attributes:
        run_plan: parts and tuned cut of our run.
        weights: that every training starts from.
        num_steps: optimizer steps of one timed training.
    """

    length: int
    run_plan: RunPlan
    weights: Mapping[str, Tensor]
    num_steps: int

    @property
    def parts(self) -> Run:
        """What our run is made of."""
        return self.run_plan.run

    def documents(self, step: int) -> list[Sample]:
        """Read the documents of one step, from 0, in the order of their ids."""
        data, order = self.parts.data.train, self.parts.data.order
        cursor = order.start
        for _ in range(step):
            cursor = order.next(cursor).after
        return [data.read(int(i), seed=0, epoch=0) for i in order.next(cursor).ids]

    def task(
        self, num_steps: int, dtype: torch.dtype = torch.float32, *, bf16: bool = False
    ) -> Task:
        """Set up a training from the common weights."""
        model = copy.deepcopy(self.parts.model.module)
        model.load_state_dict(self.weights)
        model.to(dtype)
        return Task(
            model=model,
            optimizer=self.parts.model.spec.build(model),
            documents=[d for step in range(num_steps) for d in self.documents(step)],
            num_steps=num_steps,
            global_batch=GLOBAL,
            micro=MICRO,
            bf16=bf16,
        )


def train_ours(setting: Setting, task: Task, *, packed: bool = False) -> None:
    """Train with the real feed and the real step, under the tuned cut."""
    word, world = "bf16" if task.bf16 else "fp32", setting.parts.world
    model = replace(setting.parts.model, precision=word, module=task.model)
    parts = replace(setting.parts, model=model)
    feed = Feed(
        parts.data,
        model.objective,
        cut=setting.run_plan.run.cut,
        layout=replace(parts.layout, packed=packed),
        world=world,
        seed=parts.config.seed,
        cursor=parts.data.order.start,
    )
    context = replace(step_context(parts), optimizer=task.optimizer)
    try:
        for _ in range(task.num_steps):
            batch = feed.next()
            feed.prefetch()
            float(train_step(context, batch, feed).loss)
    finally:
        # The loader is the setting's, and goes on.
        feed.close()


def train_without_padding(setting: Setting, task: Task) -> None:
    """Train on the tokens of every step in rows of equal length, with nothing around it."""
    cap = setting.run_plan.run.cut.max_tokens  # type: ignore[attr-defined] # the cut is `Auto`
    for step in range(task.num_steps):
        batches = equal_rows(task.documents[step * GLOBAL : (step + 1) * GLOBAL], cap)
        count = sum(batch.shape[0] * (batch.shape[1] - 1) for batch in batches)
        for batch in batches:
            total, _ = summed_loss(task.model(batch), batch)
            (total / count).backward()
        task.optimizer.step()
        task.optimizer.zero_grad()


def equal_rows(documents: Sequence[Sample], cap: int) -> list[Tensor]:
    """Fill micro-batches up to a cap, longest documents first, and make their rows equally long.

    Returns:
        `(documents, mean length)` each; of a micro-batch of `n` documents up to `n - 1` tokens are
        left over.
    """
    rows = sorted((document["input_ids"] for document in documents), key=len, reverse=True)
    groups: list[list[Tensor]] = [[]]
    for row in rows:
        if sum(map(len, groups[-1])) + len(row) > cap:
            groups.append([])
        groups[-1].append(row)
    batches = []
    for group in groups:
        length = sum(map(len, group)) // len(group)
        batches.append(torch.cat(group)[: len(group) * length].view(len(group), length))
    return batches


def trainers(setting: Setting, only: Sequence[str]) -> dict[str, Callable[[Task], None]]:
    """List the trainers by name, in the order of the table."""
    every: dict[str, Callable[[Task], None]] = {
        OURS: lambda task: train_ours(setting, task),
        PACKED: lambda task: train_ours(setting, task, packed=True),
        IDEAL: lambda task: train_without_padding(setting, task),
        **PEERS,
    }
    return {name: train for name, train in every.items() if not only or name in only}


def watched(train: Callable[[Task], None], task: Task, *, keeps: bool = False) -> Watch:
    """Train, and look on.

    Raises:
        RuntimeError: the trainer took other steps than it was asked for.
    """
    watch = Watch(task.num_steps, keeps=keeps)
    watch.attach(task.model, task.optimizer)
    train(task)
    if watch.steps != task.num_steps:
        raise RuntimeError(f"{watch.steps} optimizer steps instead of {task.num_steps}")
    return watch


def time_all(setting: Setting, only: Sequence[str], rounds: int) -> dict[str, dict[str, Any]]:
    """Time every trainer in turn; every round begins with another one."""
    names = list(trainers(setting, only))
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    tokens = sum(len(d["input_ids"]) for d in setting.task(setting.num_steps).documents)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            if "missing" in found[name]:
                continue
            try:
                watch = watched(trainers(setting, only)[name], setting.task(setting.num_steps))
            except ImportError as error:
                found[name]["missing"] = f"not installed ({error.name})"
                continue
            assert watch.timing is not None
            rate = found[name].setdefault("rate", Figures())
            rate.add(tokens / watch.timing.seconds, watch.timing)
            found[name]["padding"] = max(0.0, 1.0 - tokens / watch.positions)
            found[name]["micro_batches"] = watch.micro_batches / setting.num_steps
            print(f"  {name}: {tokens / watch.timing.seconds:.0f} tokens/s", flush=True)
    return found


def compare_gradients(setting: Setting, only: Sequence[str]) -> dict[str, dict[str, float]]:
    """Compare one step of every trainer with one padded whole batch, in float64 and in bfloat16."""
    whole = whole_batch(setting, torch.float64)
    rough = errors(setting, whole_batch(setting, torch.float32, bf16=True), whole)
    found: dict[str, dict[str, float]] = {}
    for name, train in trainers(setting, only).items():
        if name == IDEAL:
            continue
        try:
            exact = watched(train, setting.task(1, torch.float64), keeps=True)
            low = watched(train, setting.task(1, bf16=True), keeps=True)
        except ImportError:
            continue
        gradient, update = errors(setting, exact, whole)
        gradient_bf16, update_bf16 = errors(setting, low, whole)
        found[name] = {
            "gradient_fp64": gradient,
            "update_fp64": update,
            "gradient_bf16": gradient_bf16,
            "gradient_bf16_over_noise": gradient_bf16 / rough[0],
            "update_bf16": update_bf16,
            "update_bf16_over_noise": update_bf16 / rough[1],
        }
        print(f"  {name}: gradient off by {gradient:.1e} in float64", flush=True)
    return found


def whole_batch(setting: Setting, dtype: torch.dtype, *, bf16: bool = False) -> Watch:
    """Take one step on all documents in one padded piece.

    Blocks recompute, which changes no bit and lets 64 long documents in float64 into memory.
    """
    task = replace(setting.task(1, dtype, bf16=bf16), micro=GLOBAL)
    checkpoint_blocks(task.model)
    return watched(hand_loop, task, keeps=True)


def errors(setting: Setting, found: Watch, whole: Watch) -> tuple[float, float]:
    """Give the relative errors of a gradient, and of the update that AdamW makes of it."""
    before = {name: weight.double() for name, weight in setting.weights.items()}
    made = {name: whole.weights[name] - before[name] for name in whole.weights}
    return (
        distance(found.gradient, whole.gradient) / norm(whole.gradient),
        distance(found.weights, whole.weights) / norm(made),
    )


def norm(tensors: Gradient) -> float:
    """2-norm over all tensors."""
    return float(sum(tensor.square().sum() for tensor in tensors.values())) ** 0.5


def distance(found: Gradient, expected: Gradient) -> float:
    """2-norm of a difference; names may begin with those of wrappers."""
    return norm({name: found[name] - expected[name] for name in expected})


@contextmanager
def fresh_notebook() -> Iterator[None]:
    """Let the tuner measure anew, whatever earlier runs found and noted."""
    before = os.environ.get("TRAIN_CACHE")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRAIN_CACHE"] = folder
        try:
            yield
        finally:
            os.environ.pop("TRAIN_CACHE")
            if before is not None:
                os.environ["TRAIN_CACHE"] = before


def set_up(length: int, arguments: argparse.Namespace) -> Setting:
    """Build our run at one maximal length, and tune it."""
    lines = [
        "data=stdlib",
        f"data.max_length={length}",
        "data.overlong=cut",
        f"batch.global={GLOBAL}",
        "accum=auto",
        "precision=fp32",
        f"model.width={arguments.width}",
        f"model.num_layers={arguments.layers}",
        f"model.num_heads={arguments.heads}",
        "optimizer=adamw",
        "optimizer.lr=0.001",
        "scheduler=constant",
        "scheduler.warmup=0",
        "clip_norm=null",
        "steps=1000",
    ]
    config = prepare_run(lines, Composer()).config
    parts = assemble(config, World())
    with fresh_notebook():
        run_plan = prepare(parts)
    weights = parts.model.module.state_dict()
    return Setting(length=length, run_plan=run_plan, weights=weights, num_steps=arguments.steps)


def trained(setting: Setting, num_steps: int) -> dict[str, Tensor]:
    """Train a little, under our cut, for weights that are no longer random."""
    task = setting.task(num_steps, bf16=True)
    train_ours(setting, task)
    return copy.deepcopy(task.model.state_dict())


def print_results(setting: Setting, found: Mapping[str, Mapping[str, Any]]) -> None:
    """Print one table: speed, then exactness."""
    rate = found[OURS]["rate"].median if OURS in found else None
    rates = [row["rate"] for row in found.values() if "rate" in row]
    noise = max(rate.foreign for rate in rates)
    rounds = max(len(rate.values) for rate in rates)
    header = ("", "tokens/s", "ours is", "padding", "micro", "gradient", "update", "bf16", "update")
    rows = []
    for name, row in found.items():
        if "missing" in row:
            rows.append((name, row["missing"], *[""] * 7))
            continue
        times = "" if rate is None else f"{rate / row['rate'].median:.2f}x"
        speed = (
            row["rate"].show(".0f"),
            times,
            f"{row['padding']:.1%}",
            f"{row['micro_batches']:.1f}",
        )
        exact = [""] * 4
        if "gradient_fp64" in row:
            exact = [f"{row[key]:.1e}" for key in ("gradient_fp64", "update_fp64")]
            keys = ("gradient_bf16_over_noise", "update_bf16_over_noise")
            exact += [f"{row[key]:.2f}x" for key in keys]
        rows.append((name, *speed, *exact))
    print(f"\nmax_length {setting.length}: median (min-max) of {rounds} rounds")
    print_table(header, rows)
    print(f"up to {noise:.0%} of the machine was used by other programs")


def whole_numbers(text: str) -> list[int]:
    """Read `512,2048`; nothing is an empty list."""
    return [int(part) for part in text.split(",") if part]


def main() -> None:
    """Measure, print the tables, and write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=whole_numbers, default=[512, 2048])
    parser.add_argument("--exact", type=whole_numbers, default=[512, 2048])
    parser.add_argument("--trained", type=int, default=20)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", type=lambda text: text.split(","), default=[])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, default=FOLDER / "ragged.json")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    results: dict[str, Any] = {}
    for length in arguments.lengths:
        setting = set_up(length, arguments)
        print(f"\nmax_length {length}: {setting.run_plan.how}", flush=True)
        found = time_all(setting, arguments.only, arguments.rounds)
        if length in arguments.exact:
            setting = replace(setting, weights=trained(setting, arguments.trained))
            for name, row in compare_gradients(setting, arguments.only).items():
                found[name].update(row)
        print_results(setting, found)
        results[str(length)] = {
            "method": setting.run_plan.how,
            "rows": {
                name: row | ({"rate": row["rate"].to_json()} if "rate" in row else {})
                for name, row in found.items()
            },
        }
    write_results(arguments.json, vars(arguments), results)


if __name__ == "__main__":
    main()
