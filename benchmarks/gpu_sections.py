"""The sections of the GPU benchmark: each lists its rows, with what measures them.

A row needs so many seconds on an H100, compiling included; it is not begun with less time left.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
from common import machine as facts
from gpu_checks import CHECKOUT, checks
from gpu_compare import Comparison
from gpu_run import RAGGED, WINDOWS, Bench, Fields, synchronize
from gpu_waits import GpuWaits, ReadNumbers

Row = tuple[str, float, Callable[[], Fields | list[tuple[str, Fields]]]]
"""Name, seconds needed, and what gives its fields; or those of several rows by name."""


def machine(bench: Bench) -> Iterator[Row]:
    """What it runs on, and what its matrix products and copies reach at best."""

    def look() -> Fields:
        found = facts()
        if not bench.scale.is_gpu:
            return {**found, "gpu": None, "bf16_tflops": None, "gigabytes_per_s": None}
        free, total = torch.cuda.mem_get_info()
        return {
            **found,
            "gpu": torch.cuda.get_device_name(),
            "driver": _driver(),
            "capability": torch.cuda.get_device_capability(),
            "cuda": torch.version.cuda,
            "free_bytes": free,
            "total_bytes": total,
            "flash": torch.backends.cuda.is_flash_attention_available(),
            "bf16_tflops": _product_tflops(),
            "gigabytes_per_s": _copy_rate(),
        }

    yield "machine", 5, look


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _product_tflops() -> float:
    """Time products of square bf16 matrices."""
    size, count = 8192, 20
    x = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    return 2 * size**3 * count / _gpu_seconds(lambda: x @ x, count) / 1e12


def _copy_rate() -> float:
    """Time copies within the GPU's memory, bytes read and written."""
    count = 20
    x = torch.empty(2**30, device="cuda", dtype=torch.uint8)
    return 2 * x.nbytes * count / _gpu_seconds(x.clone, count) / 1e9


def _gpu_seconds(task: Callable[[], object], count: int) -> float:
    for _ in range(3):
        task()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        task()
    end.record()
    synchronize()
    return begin.elapsed_time(end) / 1e3


def compare_windows(bench: Bench) -> Iterator[Row]:
    """Ours beside other loops, on windows of one length."""
    yield WINDOWS, 70, lambda: Comparison(bench, WINDOWS).table()


def compare_ragged(bench: Bench) -> Iterator[Row]:
    """Ours beside other loops, on documents as they come."""
    yield RAGGED, 80, lambda: Comparison(bench, RAGGED).table()


def memory(bench: Bench) -> Iterator[Row]:
    """Memory predicted and measured, by cap, packing and recomputation."""
    length = bench.scale.length
    for cap, packed, recompute in itertools.product(bench.scale.caps, (False, True), (False, True)):
        lines = (
            "accum=budget",
            f"accum.max_tokens={cap}",
            f"accum.packed={packed}".lower(),
            f"activation_checkpointing={recompute}".lower(),
            f"batch.global={2 * cap // length}",
        )

        def measure(lines: Sequence[str] = lines) -> Fields:
            found = bench.timed(WINDOWS, *lines, steps=1)
            predicted, allocated = found["predicted_bytes"], found["allocated_bytes"]
            return {
                "predicted_bytes": predicted,
                "allocated_bytes": allocated,
                "off": predicted / allocated - 1 if predicted else None,
                "reserved_bytes": found["reserved_bytes"],
                "replays": sum(line.get("replays", 0) for line in bench.lines_of_last_run()),
                "step_s": found["step_s"],
                "predicted_s": found["predicted_s"],
                "tokens_per_s": found["tokens_per_s"],
            }

        words = f"{cap:,}{' packed' if packed else ''}{' recomputed' if recompute else ''}"
        yield words, 6, measure


def chats(bench: Bench) -> Iterator[Row]:
    """Ours beside TRL and Hugging Face's Trainer on conversations."""
    size = "--hidden 768 --layers 12 --vocab 8192 --rounds 3 --steps 4 --device cuda"
    if not bench.scale.is_gpu:
        size = "--hidden 64 --layers 1 --vocab 512 --rounds 1 --steps 1 --records 64"

    def measure() -> list[tuple[str, Fields]]:
        file = bench.folder / "sft.json"
        command = [sys.executable, str(CHECKOUT / "benchmarks" / "sft.py"), *size.split()]
        with (bench.logs / "sft.log").open("w") as log:
            subprocess.run(
                [*command, "--json", str(file)],
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=max(1.0, bench.left_s),
                check=True,
            )
        rows = json.loads(file.read_text())["results"]
        return [
            (
                name,
                {
                    "tokens_per_s": row.get("rate", {}).get("median"),
                    "padding": row.get("padding"),
                    "micro_batches": row.get("micro_batches"),
                    "skipped": row.get("missing"),
                },
            )
            for name, row in rows.items()
        ]

    yield "chats", 70, measure


def graphs(bench: Bench) -> Iterator[Row]:
    """Graphs compiled by the end of each step, also with one for each length."""
    for kind, packed, as_is in (
        *((RAGGED, "true", True), (RAGGED, "false", True), (WINDOWS, "false", True)),
        (RAGGED, "false", False),
    ):

        def measure(kind: str = kind, packed: str = packed, as_is: bool = as_is) -> Fields:
            from torch._dynamo.utils import counters  # noqa: PLC0415 - a second

            known, seconds = list[int](), [time.monotonic()]

            def inside(_: int) -> None:
                known.append(counters["stats"]["unique_graphs"])
                seconds.append(time.monotonic())

            counters.clear()
            steps = 4 * bench.scale.steps
            lines = (f"accum.packed={packed}", "compile=true", *under_cap(bench))
            static = torch._dynamo.config.patch(automatic_dynamic_shapes=False)
            with nullcontext() if as_is else static:
                found = bench.timed(kind, *lines, steps=steps, inside=inside)
            return {
                "graphs": " ".join(map(str, known)),
                "seconds_by_step": " ".join(f"{b - a:.2f}" for a, b in itertools.pairwise(seconds)),
                "tokens_per_s": found["tokens_per_s"],
                "mfu": found["mfu"],
            }

        yield f"{kind}, packed={packed}{'' if as_is else ', a graph a length'}", 25, measure


def kernels(bench: Bench) -> Iterator[Row]:
    """What the GPU does in a step, the kernels that take longest first."""
    for kind, lines in (
        (WINDOWS, ("compile=true",)),
        (RAGGED, ("compile=true", "accum.packed=true")),
    ):

        def measure(kind: str = kind, lines: tuple[str, ...] = lines) -> list[tuple[str, Fields]]:
            of = torch.profiler.ProfilerActivity
            profiler = torch.profiler.profile(
                activities=[of.CUDA if bench.scale.is_gpu else of.CPU]
            )
            began = [0.0]

            def inside(number: int) -> None:
                synchronize()
                if number == bench.scale.warm_up:
                    profiler.start()
                    began.append(time.perf_counter())
                if number == bench.scale.warm_up + 1:
                    began.append(time.perf_counter())
                    profiler.stop()

            found = bench.timed(kind, *lines, *under_cap(bench), steps=1, inside=inside)
            events = profiler.key_averages()
            times = {e.key: (e.self_device_time_total / 1e3, e.count) for e in events}
            if not bench.scale.is_gpu:
                times = {e.key: (e.self_cpu_time_total / 1e3, e.count) for e in events}
            busy = sum(ms for ms, _ in times.values())
            longest = sorted(times.items(), key=lambda item: -item[1][0])[:14]
            name = f"{kind} {' '.join(lines)}"
            first = {"ms": busy, "wall_ms": 1e3 * (began[2] - began[1]), "mfu": found["mfu"]}
            return [
                (name, first),
                *(
                    (f"    {key[:90]}", {"ms": ms, "count": count, "share": ms / busy})
                    for key, (ms, count) in longest
                ),
            ]

        yield f"{kind} {' '.join(lines)}", 15, measure


SETTINGS: Mapping[str, tuple[str, tuple[tuple[str, ...], ...]]] = {
    "precision": (
        WINDOWS,
        tuple((f"precision={word}",) for word in ("bf16", "auto", "tf32", "fp16", "fp32")),
    ),
    "packed": (RAGGED, (("accum.packed=false",), ("accum.packed=true",))),
    "recompute": (
        WINDOWS,
        (
            ("activation_checkpointing=false",),
            ("activation_checkpointing=true",),
            ("activation_checkpointing=auto", "accum=auto"),
        ),
    ),
    "compile": (WINDOWS, (("compile=false",), ("compile=true",))),
    "compile ragged": (RAGGED, (("compile=false",), ("compile=true",))),
    "sync": (WINDOWS, (("sync=deferred",), ("sync=overlapped",), ("sync=immediate",))),
    "profile": (WINDOWS, (("profile=0",), ("profile=2",))),
    "eval.samples": (
        RAGGED,
        (("eval.every=2", "eval.samples=null"), ("eval.every=2", "eval.samples=64")),
    ),
}
"""What is compared with what, all else equal; the first of each is the base."""


def settings(bench: Bench) -> Iterator[Row]:
    """One setting after the other, changed alone, under one cap."""
    for group, (kind, choices) in SETTINGS.items():
        base: list[float] = []
        for choice in choices:
            cap = (
                ()
                if "accum=auto" in choice
                else ("accum=budget", f"accum.max_tokens={bench.scale.cap}")
            )
            needs = 35 if choice[0] == "compile=true" else 20 if choice[0].endswith("fp32") else 6

            def measure(
                kind: str = kind,
                lines: tuple[str, ...] = (*cap, *choice),
                base: list[float] = base,
            ) -> Fields:
                found = bench.timed(kind, *lines)
                base.append(found["tokens_per_s"])
                evaluations = [line for line in bench.lines_of_last_run() if "eval_seconds" in line]
                return {
                    "tokens_per_s": found["tokens_per_s"],
                    "over_base": found["tokens_per_s"] / base[0],
                    "mfu": found["mfu"],
                    "allocated_bytes": found["allocated_bytes"],
                    "eval_s": evaluations[0]["eval_seconds"] if evaluations else None,
                }

            yield f"{group}: {' '.join(choice)}", needs, measure


def under_cap(bench: Bench) -> tuple[str, ...]:
    """Give the overrides of the cap that settings are compared under."""
    return "accum=budget", f"accum.max_tokens={bench.scale.cap}"


def syncs(bench: Bench) -> Iterator[Row]:
    """How often a step makes the host wait for the device, and where: once is the aim."""
    for kind, packed in ((WINDOWS, "false"), (RAGGED, "true")):

        def measure(kind: str = kind, packed: str = packed) -> Fields:
            steps, warm_up = 3 * bench.scale.steps, bench.scale.warm_up
            counter = GpuWaits() if bench.scale.is_gpu else ReadNumbers()

            def inside(number: int) -> None:
                if number == warm_up:
                    counter.begin()
                if number == warm_up + steps:
                    counter.end()

            lines = (
                f"accum.packed={packed}",
                "accum=budget",
                f"accum.max_tokens={bench.scale.cap}",
            )
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    bench.timed(kind, *lines, steps=steps, inside=inside)
                finally:
                    if bench.scale.is_gpu:
                        counter.end()  # a run that failed did not
            places = counter.places(caught)
            return {"per_step": sum(places.values()) / steps, "places": dict(places)}

        yield f"{kind}, packed={packed}", 8, measure


def long_run(bench: Bench) -> Iterator[Row]:
    """Many ragged steps at the chosen cap, in memory that is scarce: nothing may be retried."""

    def measure() -> Fields:
        scale, ballast = bench.scale, None
        if scale.is_gpu:
            torch.cuda.empty_cache()
            free, _ = torch.cuda.mem_get_info()
            ballast = torch.empty(max(0, free - scale.left_bytes), dtype=torch.uint8, device="cuda")
        before = _allocator()
        few = replace(bench, scale=replace(scale, few=max(2, scale.few // 4)))
        found = few.timed(RAGGED, "accum=auto", steps=scale.many)
        after = _allocator()
        del ballast
        entries = bench.lines_of_last_run()
        return {
            "steps": scale.many,
            "cap": found["cap"],
            "retries": after[0] - before[0],
            "out_of_memory": after[1] - before[1],
            "replays": sum(entry.get("replays", 0) for entry in entries),
            "allocated_bytes": found["allocated_bytes"],
            "reserved_bytes": found["reserved_bytes"],
            "reserved_over_allocated": found["reserved_bytes"] / found["allocated_bytes"],
            "tokens_per_s": found["tokens_per_s"],
        }

    yield f"{bench.scale.many} ragged steps", 45, measure


def _allocator() -> tuple[int, int]:
    """Count the allocator's retries and failures so far."""
    if not torch.cuda.is_available():
        return 0, 0
    stats = torch.cuda.memory_stats()
    return stats["num_alloc_retries"], stats["num_ooms"]


def sweep(bench: Bench) -> Iterator[Row]:
    """`accum=auto` beside every cap."""
    for kind in (WINDOWS, RAGGED):
        rates: list[float] = []
        caps = [cap for cap in bench.scale.caps if cap >= bench.scale.length]
        names = {f"cap {cap:,}": ("accum=budget", f"accum.max_tokens={cap}") for cap in caps}
        for name, lines in {**names, "auto": ("accum=auto",)}.items():

            def measure(
                kind: str = kind, lines: Sequence[str] = lines, rates: list[float] = rates
            ) -> Fields:
                found = bench.timed(kind, *lines)
                rates.append(found["tokens_per_s"])
                return {
                    "tokens_per_s": rates[-1],
                    "of_best": rates[-1] / max(rates),
                    "mfu": found["mfu"],
                    "cap": found["cap"],
                    "micro_batches": found["micro_batches"],
                    "allocated_bytes": found["allocated_bytes"],
                }

            yield f"{kind}, {name}", 16 if name == "auto" else 7, measure


SECTIONS: Mapping[str, Callable[[Bench], Iterator[Row]]] = {
    "machine": machine,
    "checks": checks,
    "windows": compare_windows,
    "documents": compare_ragged,
    "chats": chats,
    "syncs": syncs,
    "kernels": kernels,
    "long run": long_run,
    "memory": memory,
    "graphs": graphs,
    "settings": settings,
    "sweep": sweep,
}
"""In the order of their value."""
