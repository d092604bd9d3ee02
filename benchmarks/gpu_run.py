"""Measure runs of the trainer as a user starts them, in this process, on data made on the spot.

A run is `trainer.train([...])` with a hook that looks at the clock, and that ends the run after
the last step it needs: a measurement writes no checkpoint.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, final

import numpy as np
import torch
from torch import Tensor

from trainer import train
from trainer.launch.start import set_process_defaults
from trainer.tune.flops import peak_flops

WINDOWS, RAGGED = "windows", "documents"
"""The two kinds of data: windows of one length, and documents as they come."""

Fields = dict[str, Any]
"""What a row of a table says."""

PLANNED_STEPS = 2000
"""Length of the run that is begun: tuning may take 2 % of it, at most 10 s."""


@final
@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large everything is.

    Attributes:
        shape: arguments of the model.
        documents: in the data.
        median: of their lengths, which are lognormal with a sigma of 1, cut at the model's.
        global_batch: samples of a step where trainers are compared.
        few: samples of a step where settings are.
        micro: samples of a micro-batch of the trainers that do not find it out.
        cap: tokens of a micro-batch where settings are compared.
        caps: of the tables of memory and of speed.
        turns: timed turns of every trainer, after one that warms up.
        steps: optimizer steps of a turn or of a run, after `warm_up` of them.
        many: steps of the long run.
        left_bytes: GPU memory that the long run is left.
    """

    device: str
    shape: Mapping[str, Any]
    documents: int
    median: float
    global_batch: int
    few: int
    micro: int
    cap: int
    caps: tuple[int, ...]
    turns: int
    steps: int
    warm_up: int
    many: int
    left_bytes: int

    @property
    def length(self) -> int:
        """Tokens of a window, and of the longest document."""
        return int(self.shape["max_length"])

    @property
    def is_gpu(self) -> bool:
        """Whether what is measured is a GPU."""
        return self.device == "cuda"


GPT2 = {
    "vocab_size": 50_257,
    "width": 768,
    "num_layers": 12,
    "num_heads": 12,
    "max_length": 1024,
}

FULL = Scale(
    device="cuda",
    shape=GPT2,
    documents=8192,
    median=300.0,
    global_batch=256,
    few=128,
    micro=32,
    cap=16_384,
    caps=(4096, 16_384, 65_536),
    turns=3,
    steps=3,
    warm_up=2,
    many=200,
    left_bytes=12 * 2**30,
)

TOY = Scale(
    device="cpu",
    shape={"vocab_size": 96, "width": 16, "num_layers": 1, "num_heads": 2, "max_length": 32},
    documents=96,
    median=10.0,
    global_batch=8,
    few=4,
    micro=4,
    cap=64,
    caps=(64,),
    turns=1,
    steps=1,
    warm_up=1,
    many=4,
    left_bytes=0,
)


class Documents:
    """Documents of random tokens, as `make_data` wrote them."""

    draws_randomness = False

    def __init__(self, path: str) -> None:
        self.tokens = np.memmap(Path(path) / "tokens.bin", dtype="<u2", mode="r")
        self.ends = np.load(Path(path) / "ends.npy")
        self.lengths = np.diff(self.ends, prepend=0)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        end = self.ends[index]
        row = self.tokens[end - self.lengths[index] : end].astype(np.int64)
        ids = torch.from_numpy(row)
        return {"input_ids": ids, "labels": ids}


def make_data(folder: Path, scale: Scale) -> None:
    """Write documents of lognormal lengths, end to end, whose tokens are skewed to small ids."""
    numbers = np.random.default_rng(0)
    drawn = np.exp(np.log(scale.median) + numbers.standard_normal(scale.documents))
    lengths = np.clip(drawn, 2, scale.length).astype(np.int64)
    np.save(folder / "ends.npy", lengths.cumsum())
    tokens = numbers.random(lengths.sum()) ** 3 * scale.shape["vocab_size"]
    tokens.astype("<u2").tofile(folder / "tokens.bin")


class Stop(BaseException):
    """Ends a run that was measured; of hooks, mere exceptions are reported and passed over."""


class OutOfTime(BaseException):
    """Ends a run whose time is up before it was measured."""


class Watcher(Protocol):
    """Whoever looks at a run."""

    def step(self, entry: Mapping[str, Any]) -> None:
        """See a step's line of metrics.jsonl; a GPU's comes when the next step is under way."""


class Probe:
    """The hook of every measured run: passes on what it sees."""

    watcher: Watcher | None = None

    def on_step(self, entry: Mapping[str, Any]) -> None:
        """See a step."""
        if Probe.watcher is not None:
            Probe.watcher.step(entry)


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@final
@dataclass
class Clock:
    """Times the steps of a run behind the first few, and ends it.

    Attributes:
        seconds: of the timed steps.
        tokens: real ones behind them.
        last: the last step's line of metrics.jsonl.
    """

    steps: int
    warm_up: int
    ends_at: float
    inside: Callable[[int], None] = lambda _: None  # called at every step with its number
    seconds: float = 0.0
    tokens: int = 0
    last: dict[str, Any] = field(default_factory=dict)
    _began: tuple[float, int] = (0.0, 0)

    def step(self, entry: Mapping[str, Any]) -> None:
        """See a step."""
        number = entry["step"]
        if time.monotonic() > self.ends_at:
            raise OutOfTime
        if number == self.warm_up:
            synchronize()
            self._began = time.perf_counter(), entry["tokens"]
        self.inside(number)
        if number == self.warm_up + self.steps:
            synchronize()
            self.seconds = time.perf_counter() - self._began[0]
            self.tokens, self.last = entry["tokens"] - self._began[1], dict(entry)
            raise Stop


@final
@dataclass(frozen=True, kw_only=True)
class Bench:
    """Where everything is measured.

    Attributes:
        folder: for data and runs, deleted in the end.
        logs: for what stays.
        ends_at: when the time is up, by `time.monotonic`.
        commands: parts of the names of those that are run.
        peers: names of the trainers beside ours; all, if none.
    """

    scale: Scale
    folder: Path
    logs: Path
    ends_at: float
    commands: tuple[str, ...] = ("",)
    peers: tuple[str, ...] = ()
    _numbers: Any = field(default_factory=itertools.count)

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return self.ends_at - time.monotonic()

    def lines(self, kind: str, *more: str) -> list[str]:
        """Write the overrides of a run on one kind of data; later ones win."""
        scale = self.scale
        data = {
            WINDOWS: [
                *("data=tokens", "data.dtype=uint16", f"data.max_length={scale.length}"),
                f"data.path={self.folder / 'tokens.bin'}",
            ],
            RAGGED: [f"data._target_={__name__}.Documents", f"data.path={self.folder}"],
        }[kind]
        typed = [
            "model=gpt2",
            *(f"model.{name}={value}" for name, value in scale.shape.items()),
            *data,
            f"device={scale.device}",
            "precision=bf16",
            f"batch.global={scale.few}",
            "optimizer.lr=6e-4",
            "scheduler=constant",
            "scheduler.warmup=0",
            f"steps={PLANNED_STEPS}",
            "eval.every=null",
            "checkpoint.every=null",
            "log.every=1000000",
            "wandb.mode=disabled",
            f"hooks=[{__name__}.Probe]",
            f"hydra.run.dir={self.folder / f'run-{next(self._numbers):04}'}",
            *more,
        ]
        return list({line.partition("=")[0]: line for line in typed}.values())

    def run(self, lines: Sequence[str], watcher: Watcher) -> dict[str, Any]:
        """Train until the watcher has seen enough; gives the plan.

        Raises:
            RuntimeError: the run ended first.
        """
        Probe.watcher = watcher
        try:
            train(lines)
        except Stop:
            plan: dict[str, Any] = json.loads((self._last_run / "plan.json").read_text())
            return plan
        finally:
            Probe.watcher = None
        raise RuntimeError("the run ended before it was measured")

    def lines_of_last_run(self) -> list[dict[str, Any]]:
        """Read the metrics of the run before."""
        lines = (self._last_run / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    @property
    def _last_run(self) -> Path:
        return max(self.folder.glob("run-*"))

    def timed(
        self,
        kind: str,
        *more: str,
        steps: int | None = None,
        inside: Callable[[int], None] = lambda _: None,
    ) -> dict[str, Any]:
        """Time a run; gives what a row of a table says of one."""
        scale = self.scale
        clock = Clock(steps or scale.steps, scale.warm_up, self.ends_at, inside)
        lines, held = self.lines(kind, *more), start_afresh()
        plan = self.run(lines, clock)
        rate = clock.tokens / clock.seconds
        return {
            "tokens_per_s": rate,
            "mfu": utilization(rate, scale, self.tokens_seen(kind)),
            "step_s": clock.seconds / clock.steps,
            "predicted_s": plan["step_seconds"],
            "cap": plan["max_tokens"],
            "micro_batches": clock.last["micro_batches"],
            "padding": clock.last["padding"],
            **memory_of(clock.last, held),
            "predicted_bytes": plan["predicted_peak_bytes"],
        }

    def tokens_seen(self, kind: str) -> float:
        """Give the tokens that attention reaches from one, at most, in the mean over tokens."""
        if kind == WINDOWS:
            return self.scale.length
        lengths = Documents(str(self.folder)).lengths
        return float(np.square(lengths).sum() / lengths.sum())


def start_afresh() -> int:
    """Free what the run before left, and count memory from here; gives the bytes that stay."""
    gc.collect()
    torch._dynamo.reset()  # else the recompilations of all runs count against one limit
    if not torch.cuda.is_available():
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def memory_of(entry: Mapping[str, Any], held: int) -> dict[str, Any]:
    """Give the peaks of a run in bytes beyond those held before it.

    On a CPU what is resident stands for them.
    """
    if not torch.cuda.is_available():
        return {"allocated_bytes": entry["memory_bytes"], "reserved_bytes": entry["memory_bytes"]}
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated() - held,
        "reserved_bytes": torch.cuda.max_memory_reserved() - held,
    }


def utilization(tokens_per_s: float, scale: Scale, tokens_seen: float) -> float | None:
    """Give the share of the GPU's dense bf16 rate that useful tokens need.

    `6 N + 12 L d T` FLOP a token (Chowdhery et al. 2022, 2204.02311, appendix B), where `N` counts
    all parameters but those of positions, `d` is the width and `T` the tokens that attention sees.
    None on a device whose rate is not listed.
    """
    peak = peak_flops(torch.device(scale.device), "bf16")
    if peak is None:
        return None
    width, layers = scale.shape["width"], scale.shape["num_layers"]
    parameters = scale.shape["vocab_size"] * width + layers * 12 * width**2
    per_token = 6 * parameters + 12 * layers * width * tokens_seen
    return tokens_per_s * per_token / peak


def prepare_process(scale: Scale, folder: Path) -> None:
    """Let runs of this process print nothing and remember nothing beyond it.

    Before CUDA starts, whose allocator reads once what a run sets.
    """
    set_process_defaults()
    os.environ["TRAIN_BRIEF"] = "1"
    os.environ["TRAIN_CACHE"] = str(folder / "cache")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not scale.is_gpu:
        torch.set_num_threads(1)
        # Compiling takes a CPU longer than all else here: `compile=true` is gone through, no more.
        torch.compiler.set_stance("force_eager")
    make_data(folder, scale)


def reason_of(error: BaseException) -> str:
    """Say in one line why a row has no figures."""
    text = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {text}"[:300]
