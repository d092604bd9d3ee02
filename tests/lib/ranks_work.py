"""What tests let real ranks do; importable, so that other processes can."""

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.lib.looks import looks_of_a_step
from tests.lib.support import VOCABULARY, Bench, RaggedText, replicated
from tests.reliability.allocations import Struck
from trainer.accumulate.base import GradientStrategy, StepDivisors
from trainer.accumulate.sum import Sum
from trainer.core.errors import SaveError, TrainError
from trainer.core.micro_batch import IGNORED, Fields
from trainer.core.world import World
from trainer.features.text_metrics.scored import ScoredPredictions
from trainer.models.bind import bind
from trainer.models.compilation import compile_model
from trainer.models.first_weights import build_on_meta
from trainer.models.recompute import blocks_of, checkpoint_blocks
from trainer.parallel.base import Parallel
from trainer.parallel.deterministic import Ordered
from trainer.parallel.fsdp import Sharded, make_mesh
from trainer.parallel.sync import Deferred, Hierarchical, Immediate, Overlapped
from trainer.plan.cut import Cut, Layout
from trainer.plan.cuts import Fixed
from trainer.plan.lengths import Lengths
from trainer.training.data import HeldOut
from trainer.training.evaluation import evaluate_parts
from trainer.training.predictions import predict
from trainer.training.step import train_step
from trainer.tune.peak_bytes import PeakBytes

Arrays = dict[str, Any]
"""By name; None stands for no gradient."""


class Block(nn.Module):
    """A residual block whose positions see only what is before them."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        counts = torch.arange(1, x.shape[1] + 1, dtype=x.dtype, device=x.device)
        past = x.cumsum(1) / counts[:, None]
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(past)))))


class BlockLM(nn.Module):
    """`spare` is used where a sample begins with the token 3; `idle`, block `skipped` nowhere."""

    def __init__(
        self, dropout: float = 0.0, spare: bool = False, skipped: int | None = None
    ) -> None:
        super().__init__()
        width = 8
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(3))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)
        self.spare = nn.Parameter(torch.ones(width)) if spare else None
        self.idle = nn.Parameter(torch.ones(width)) if spare else None
        self.skipped = skipped

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for index, block in enumerate(self.blocks):
            x = x if index == self.skipped else block(x)
        if self.spare is not None and input_ids.numel() and bool((input_ids[:, 0] == 3).any()):
            x = x + self.spare * (input_ids[:, :1, None] == 3)
        return self.head(self.norm(x))


class Returned(nn.Module):
    """Returns what a module does as an attribute of a plain object."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.inner(x))


class ObjectLM(BlockLM):
    """Returns a plain object, and so do its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(map(Returned, self.blocks))

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x).logits
        return SimpleNamespace(logits=self.head(self.norm(x)))


def sharded(module: nn.Module, world: World, replicas: int = 1, **how: Any) -> Parallel:
    mesh = make_mesh(world, replicas)
    return Sharded(module, bind(module), list(module.blocks), world, mesh, **how)


def ordered(module: nn.Module, world: World) -> Parallel:
    return Ordered(module, bind(module), list(module.parameters()), world)


def start_sharded(build: Callable[[], nn.Module], world: World) -> tuple[nn.Module, Parallel]:
    """A sharded model that was never whole."""
    module, weights = build_on_meta(build)
    blocks = blocks_of(module)
    mesh = make_mesh(world)
    return module, Sharded(module, bind(module), blocks, world, mesh, weights=weights)


MODES: dict[str, Callable[..., Parallel]] = {
    "ddp": replicated,
    "small buckets": partial(replicated, bucket_bytes=400),
    "fsdp": sharded,
    "hsdp": partial(sharded, replicas=2),
    "ordered": ordered,
}
POLICIES = {
    "deferred": Deferred,
    "overlapped": Overlapped,
    "immediate": Immediate,
    "hierarchical": Hierarchical,
}


@dataclass(frozen=True)
class Case:
    cut: Cut
    mode: str = "ddp"
    sync: str = "deferred"
    dtype: torch.dtype = torch.float64
    steps: int = 1
    dropout: float = 0.0
    spare: bool = False
    global_batch: int = 16
    normalizer: str = "tokens"
    clip_norm: float | None = None
    masked: tuple[int, ...] = ()
    points: tuple[str, ...] = ()
    """Where memory runs out: `rank:attempt:micro-batch:phase`."""
    skipped: int | None = None
    """The block that the last rank does not use."""
    poisoned: int | None = None
    """The rank whose first loss is not finite."""
    layout: Layout = field(default_factory=Layout)
    variant: str = ""
    """`recomputing` or `compiled`."""
    gives_objects: bool = False


class Poisoned(GradientStrategy):
    """Gives a loss that is not finite, once."""

    done = False

    def micro_batch(self, *given):
        return Sum().micro_batch(*given)

    def walk(self, *given, **how):
        found = super().walk(*given, **how)
        self.done, first = True, not self.done
        return replace(found, loss=found.loss * float("nan")) if first else found


class Moving(BlockLM):
    """Moves state of every kind by what it sees, and keeps some that stays."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.BatchNorm1d(8)
        self.books = nn.Module()
        self.books.register_buffer("mean", torch.zeros(8))
        self.books.register_buffer("silent", torch.zeros(3, dtype=torch.bfloat16))
        self.books.register_buffer("replaced", torch.zeros(2, 2))
        self.books.register_buffer("begun", torch.tensor(False))
        self.books.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.books.register_buffer("steady", torch.ones(5))
        self.books.register_buffer("cache", torch.zeros(0), persistent=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        self.pool(x.flatten(0, 1).detach().repeat(2, 1))  # a single one has no variance
        self.books.mean.lerp_(x.detach().mean((0, 1)), 0.1)
        self.books.silent.data.add_(input_ids.sum())
        self.books.replaced = self.books.replaced + input_ids.sum()
        self.books.begun.logical_or_((input_ids == 3).any())
        self.books.calls += input_ids.numel()
        self.books.cache = torch.zeros(input_ids.numel())
        return super().forward(input_ids) + self.books.mean.sum()


def moved_each(world: World, cases: list[Case]) -> list[Arrays]:
    """Train, and tell what each rank goes on with."""
    found = []
    for case in cases:
        bench = bench_of(world, case, Moving)
        for _ in range(case.steps):
            bench.step()
        bench.feed.close()
        found.append({n: plain(b.double()) for n, b in bench.module.named_buffers()})
    return found


def bench_of(world: World, case: Case, model: Callable[[], nn.Module] | None = None) -> Bench:
    data = RaggedText()
    data.masked |= set(case.masked)
    strategy: GradientStrategy = Struck(case.points)
    if case.poisoned == world.rank:
        strategy = Poisoned()
    skipped = case.skipped if world.rank == world.size - 1 else None

    def build() -> nn.Module:
        if case.gives_objects:
            return ObjectLM()
        module = BlockLM(case.dropout, spare=case.spare, skipped=skipped)
        assert case.variant != "recomputing" or checkpoint_blocks(module)
        if case.variant == "compiled":
            # All that a compiler sees, without the minutes that its code generation takes.
            compile_model(module, 16, backend="aot_eager")
        return module

    return Bench(
        case.cut,
        case.dtype,
        global_batch=case.global_batch,
        normalizer=case.normalizer,
        dataset=data,
        model=model or build,
        strategy=strategy,
        clip_norm=case.clip_norm,
        layout=case.layout,
        world=world,
        lay_out=MODES[case.mode] if world.size > 1 or case.mode == "ordered" else replicated,
        sync=POLICIES[case.sync](),
    )


def plain(tensor: Tensor) -> np.ndarray:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().numpy().copy()


def error(found: Arrays, expected: Arrays) -> float:
    """Largest relative error over tensors; None must meet None."""
    assert found.keys() == expected.keys()
    assert [n for n in found if found[n] is None] == [n for n in found if expected[n] is None]
    return max(
        float(np.linalg.norm(found[n].astype(np.float64) - expected[n]))
        / max(float(np.linalg.norm(expected[n])), 1e-30)
        for n in expected
        if expected[n] is not None
    )


def gradients_of(module: nn.Module) -> Arrays:
    named = module.named_parameters()
    return {name: None if p.grad is None else plain(p.grad) for name, p in named}


def gradient_of_step(bench: Bench) -> tuple[Arrays, float, int]:
    """Take a step; gives its gradient, caught before the update, its loss and replays."""
    found: Arrays = {}
    hook = bench.context.optimizer.register_step_pre_hook
    hook(lambda *_: found.update(gradients_of(bench.module)))
    report = bench.step()
    bench.feed.close()
    return found, float(report.loss), report.replays


def run_steps(world: World, case: Case) -> dict[str, Any]:
    """Train, and tell everything that must not depend on the ranks."""
    bench = bench_of(world, case)
    answer: dict[str, Any] = {"loss": [], "norm": [], "ids": [], "skipped": [], "replays": []}
    answer["counts"] = []

    def keep(*_: object) -> None:
        answer["last gradient"] = gradients_of(bench.module)
        answer.setdefault("gradient", answer["last gradient"])

    bench.context.optimizer.register_step_pre_hook(keep)
    for _ in range(case.steps):
        report = bench.step()
        answer["loss"].append(float(report.loss))
        answer["norm"].append(float(report.grad_norm))
        answer["ids"].append(report.batch.samples.ids.tolist())
        answer["skipped"].append(report.skipped)
        answer["replays"].append(report.replays)
        answer["counts"].append(len(report.batch.micro_batches))
    answer["cut"] = bench.feed.cut
    answer["parameters"] = {name: plain(p) for name, p in bench.module.named_parameters()}
    bench.feed.close()
    return answer


def count_looks(world: World, case: Case) -> list[str]:
    """Where the host looks at the device in a step."""
    return looks_of_a_step(bench_of(world, case))


def run_each(world: World, cases: list[Case]) -> list[dict[str, Any]]:
    return [run_steps(world, case) for case in cases]


def strike_each(
    world: World, case: Case, strikes: list[tuple[str, ...]]
) -> list[tuple[list[int], Any, str]]:
    """Let memory run out here and there; gives replays, the last cut and a digest of each run."""
    found = []
    for points in strikes:
        answer = run_steps(world, replace(case, points=points))
        digest = hashlib.sha256(repr((answer["loss"], answer["norm"], answer["ids"])).encode())
        for name in sorted(answer["parameters"]):
            digest.update(answer["parameters"][name].tobytes())
        found.append((answer["replays"], answer["cut"], digest.hexdigest()))
    return found


def what_is_refused(world: World, case: Case) -> tuple[int, str]:
    try:
        run_steps(world, case)
    except TrainError as error:
        return error.exit_code, str(error)
    return 0, ""


def norm_and_share(world: World, mode: str, dtype: torch.dtype) -> tuple[float, float, bool]:
    """Lay gradients of a short type out; give their norm, the right one, and whether a third of
    them is the nearest there is."""
    torch.manual_seed(0)
    model = MODES[mode](BlockLM().to(dtype), world)
    wholes = [300 * torch.randn(p.shape).to(dtype) for p in model.parameters]
    for parameter, whole in zip(model.parameters, wholes, strict=True):
        parameter.grad = whole.clone()
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            parameter.grad = distribute_tensor(whole, mesh, placements, src_data_rank=None)
    norm = float(model.gradient_norm())
    model.scale_gradients(torch.tensor(1 / 3))
    grads = [plain(p.grad.float()) for p in model.parameters]
    near = [(whole.float() / 3).to(dtype).float().numpy() for whole in wholes]
    exact = torch.cat([whole.double().flatten() for whole in wholes]).norm()
    return norm, float(exact), all(map(np.array_equal, grads, near))


def sum_in_integers(world: World, gradients: np.ndarray) -> np.ndarray:
    """Give the step's gradient of one parameter, of micro-batches in turn over the ranks."""
    module = nn.ParameterList([torch.from_numpy(np.zeros_like(gradients[0]))])
    model = ordered(module, world)
    (parameter,) = model.parameters
    model.gather()
    for gradient in gradients[world.rank :: world.size]:
        with model.micro_batch(is_last=False):
            parameter.grad = torch.from_numpy(gradient.copy())
    model.reduce([True])
    return parameter.grad.numpy()


class Allocations(TorchDispatchMode):
    MAKES = ("empty", "zeros", "ones", "full", "clone", "cat", "_to_copy")

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        made = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name.removeprefix("new_").removesuffix("_like").removesuffix("_strided") in self.MAKES:
            self.sizes.append(made.untyped_storage().nbytes())
        return made


def bytes_around_the_vote(world: World, mode: str) -> tuple[list[int], list[int]]:
    """Tell what is allocated for the reduction before ranks agree, and what after.

    The first rank alone uses one of the parameters.
    """
    bench = bench_of(world, Case(Fixed(micro=4), mode, dtype=torch.float32, spare=True))
    context, batch = bench.context, bench.feed.next()
    one = dict.fromkeys(context.terms, 1.0)
    each = [one] * len(batch.micro_batches)
    parts = StepDivisors(weights=one, whole=one, each=each, num_samples=batch.plan.num_samples)
    context.parallel.begin(context.model.setup.sync)
    own = (context.parallel, context.model.objective, batch.micro_batches)
    context.model.strategy.walk(*own, parts, {}, is_last=True)
    used = [name != "idle" for name, _ in bench.module.named_parameters()]
    if mode == "ddp" and world.rank:
        context.parallel.drop_gradients()
    with Allocations() as before:
        context.parallel.make_room()
    with Allocations() as after:
        context.parallel.reduce(used)
    bench.feed.close()
    return before.sizes, after.sizes


class RealBytes(TorchDispatchMode):
    """Counts tensors that take memory, of this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = PeakBytes()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        real = [t for t in leaves if not isinstance(t, FakeTensor) and not t.is_meta]
        self.peak.assign("activations", real)
        return result


UNCOUNTED = {"wait_tensor", "_wrap_tensor_autograd"}


class Collectives(TorchDispatchMode):
    """Counts collectives, those inside of DTensor operations too."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        name = func.overloadpacket.__name__
        if func.namespace in {"c10d", "_c10d_functional"} and name not in UNCOUNTED:
            kind = next((k for k in ("gather", "reduce_scatter", "allreduce") if k in name), name)
            self.counts["allreduce" if name == "all_reduce" else kind] += 1
        return func(*args, **(kwargs or {}))


def count_collectives(world: World, case: Case) -> dict[str, int]:
    bench = bench_of(world, case)
    bench.step()
    batch = bench.feed.next()
    with Collectives() as counter:
        train_step(bench.context, batch, bench.feed)
    bench.feed.close()
    return {**counter.counts, "micro_batches": len(batch.micro_batches)}


class Cramped(nn.Module):
    """Has room for so many positions on one rank, in evaluation."""

    def __init__(self, body: BlockLM, positions: int) -> None:
        super().__init__()
        self.body, self.positions = body, positions
        self.blocks = body.blocks

    def forward(self, input_ids: Tensor) -> Tensor:
        if not self.training and input_ids.numel() > self.positions:
            raise MemoryError("injected")
        return self.body(input_ids)


def evaluated(
    world: World, mode: str, num_held_out: int, positions: int = 10**9
) -> tuple[dict[str, float], list[int], bool]:
    """Evaluate on the first samples, where the second rank has room for so many positions.

    Gives metrics, the samples of this rank, and whether it is so again and no cut has changed.
    """
    room = positions if world.rank == 1 else 10**9
    bench = bench_of(world, Case(Fixed(micro=4), mode), lambda: Cramped(BlockLM(), room))
    layout, cut = Layout(world_size=world.size), bench.feed.cut
    objective = bench.objective.with_metrics(["perplexity", "f1", "mcc"])
    lengths, most = bench.dataset.lengths[:num_held_out], 30 if positions == 10**9 else 200
    lengths = Lengths.of(lengths)
    held_out = HeldOut(loader=bench.loader, lengths=lengths, layout=layout, max_tokens=most)
    seen = [i for request in held_out.requests(world.rank) for i in request.ids]
    model = replace(bench.context.model, objective=objective)
    context = replace(bench.context, model=model)
    metrics, again = (evaluate_parts(context, {"": held_out})[""] for _ in range(2))
    bench.step()
    bench.feed.close()
    return metrics, seen, metrics == again and bench.feed.cut == cut


def predicted(world: World, mode: str, num_held_out: int) -> list[dict[str, Any]]:
    bench = bench_of(world, Case(Fixed(micro=4), mode))
    lengths = Lengths.of(bench.dataset.lengths[:num_held_out])
    held_out = HeldOut(loader=bench.loader, lengths=lengths, layout=Layout(), max_tokens=30)
    found = predict(bench.context.parallel, bench.objective, held_out, world)
    bench.feed.close()
    return found


def asked_by_half(sample: Fields) -> Fields:
    """A text whose second half is the answer to the first."""
    labels = sample["input_ids"].clone()
    labels[: len(labels) // 2] = IGNORED
    return {**sample, "labels": labels}


class ByPlace:
    """A figure that each sample enters by its place."""

    def score(self, predictions: list[list[int]], references: list[list[int]]) -> dict[str, float]:
        each = zip(predictions, references, strict=True)
        return {"order": sum(i * (sum(p) + 3 * sum(r)) for i, (p, r) in enumerate(each, 1))}


def scored(world: World, mode: str, num_held_out: int, cap: int) -> tuple[Any, Any]:
    """Figures of written answers and of sums, and the lines of all samples."""
    bench = bench_of(world, Case(Fixed(micro=4), mode))
    bench.loader.prepare_with(asked_by_half)
    lengths = Lengths.of(bench.dataset.lengths[:num_held_out])
    layout = Layout(world_size=world.size)
    part = HeldOut(loader=bench.loader, lengths=lengths, layout=layout, max_tokens=cap)
    feature, lines = ScoredPredictions([ByPlace()], 6, fills_lines=False), list[dict[str, Any]]()
    context = replace(bench.context, figures=[feature.figures])
    means = evaluate_parts(context, {"": part})[""]
    lines += ({"id": i} for i in range(num_held_out))
    feature.complete("", lines)
    bench.feed.close()
    return means, lines


def share(world: World) -> tuple[list[object], str]:
    """What every rank hears of all, and of the first that could not write."""

    def work() -> None:
        raise SaveError("disk full")

    everything = world.collect({"rank": world.rank, "text": "x" * world.rank})
    try:
        world.on_main(work)
    except SaveError as error:
        return everything, f"{error} {error.exit_code}"
    return everything, "nothing"
