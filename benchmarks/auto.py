"""What `accum=auto` chooses beside every split that one might have picked by hand.

    python benchmarks/auto.py [--tunings 10] [--busy] [--rounds 5] [--max-length 512] [--threads 2]

One model and one global batch of the standard library's source; forward and backward of all its
micro-batches under each split: planned under caps in powers of two, and equal counts in sample
order. The splits take turns, so that a disturbance meets all alike. Auto is tuned in this process,
without a cache, as often as asked, before the rounds begin; with `--busy` while another program
computes on one core without a pause, which ends before the rounds. To hold: in 9 of 10 tunings at
most 5 % slower than the best split.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

import numpy as np
import torch
from common import FOLDER, Figures, Mark, Timing, print_table, write_results

from trainer.core.micro_batch import Fields
from trainer.data.loader import Loader, Request
from trainer.data.view import DataView
from trainer.features.stdlib.stdlib import StdlibText
from trainer.models.gpt import GPT
from trainer.objectives.next_token import NextToken
from trainer.optim.optimizers import AdamW
from trainer.plan.cut import Cut, IntArray, Layout, Plan
from trainer.plan.cuts import Auto, Budget, Fixed
from trainer.plan.memory import Shape
from trainer.training.model import Model
from trainer.tune.memory_limit import memory_limit
from trainer.tune.predict import predict_peak
from trainer.tune.request import Tuning, TuningRequest
from trainer.tune.speed import meter_for
from trainer.tune.tuner import tune
from trainer.tune.workload import Tiled, Workload

SLOWER = 1.05
"""What auto may lose against the best split."""

SHARE = 0.9
"""Of the tunings, that must not lose more."""

LEAST_S = 0.5
"""Seconds of one timing: of a few milliseconds, the machine's other programs decide."""

MOST_FOREIGN = 0.2
"""Share of the machine that other programs may take before nothing follows from the figures."""

PROGRAM = "import torch; torch.set_num_threads(1); x = torch.rand(512, 512)\nwhile True: x @ x"
"""What another program computes."""


@final
@dataclass
class Contender:
    """One split of the global batch.

    Attributes:
        name: for the table.
        plan: its micro-batches.
        micro_batches: loaded.
        speed: real tokens per second.
    """

    name: str
    plan: Plan
    micro_batches: list[Fields]
    speed: Figures = field(default_factory=Figures)

    @property
    def largest(self) -> Shape:
        """The shape of its largest micro-batch."""
        plan = self.plan
        rank, slot = max(plan.slots(), key=lambda at: plan.positions(*at))
        return Shape(len(plan.ranks[rank][slot]), plan.padded_lengths[rank][slot])

    def run(self, work: Workload) -> None:
        """Compute the gradient of the whole batch until `LEAST_S` are over, and note how fast."""
        begin, passes = Mark.now(), 0
        while not passes or time.perf_counter() - begin.wall < LEAST_S:
            for fields in self.micro_batches:
                work.backward(fields)
            work.model.module.zero_grad(set_to_none=True)
            passes += 1
        timing = Timing.between(begin, Mark.now())
        self.speed.add(passes * int(self.plan.lengths.sum()) / timing.seconds, timing)


def contenders(
    data: DataView, ids: IntArray, tuned: Mapping[int, Cut], longest: int, largest: int
) -> list[Contender]:
    """Cut one global batch in every way, auto's first."""
    loader, lengths = Loader(data, num_workers=0, seed=0), data.lengths[ids]
    cuts: dict[str, Cut] = {f"auto, cap {cap:,}": cut for cap, cut in tuned.items()}
    cap = longest
    while cap <= largest:
        cuts[f"planned, cap {cap:,}"] = Budget(max_tokens=cap)
        cap *= 2
    for micro in (1, 2, 4, 8, 16, 32):
        cuts[f"in order, {micro} a piece"] = Fixed(micro=micro)
    found = []
    for name, cut in cuts.items():
        plan = cut.cut(lengths, Layout())
        requests = [
            Request(tuple(map(int, ids[slot])), 0, length)
            for slot, length in zip(plan.ranks[0], plan.padded_lengths[0], strict=True)
        ]
        found.append(Contender(name, plan, [loader.load(request) for request in requests]))
    return found


@contextmanager
def another_program(*, runs: bool) -> Iterator[None]:
    """Have another program compute inside the block, if asked."""
    if not runs:
        yield
        return
    with subprocess.Popen([sys.executable, "-c", PROGRAM]) as program:
        try:
            time.sleep(3.0)  # until it computes
            yield
        finally:
            program.kill()


def tune_once(work: Workload, data: DataView, batches: list[IntArray]) -> tuple[Tuning, float]:
    """Tune as a run of a thousand steps does; gives the seconds it took too."""
    started = time.perf_counter()
    question = TuningRequest(
        work=work,
        batches=batches,
        most_samples=max(map(len, batches)),
        longest=int(data.lengths.max()),
        shortest=int(data.lengths.min()),
        cut_at=Auto().tuned,
        layout=Layout(),
        limit=memory_limit(torch.device("cpu"), resident_bytes=work.resident_bytes),
    )
    found = tune(question, meter=meter_for(work.model.device))
    seconds = time.perf_counter() - started
    print(f"a cap of {found.max_tokens:,} after {seconds:.1f} s: {found.method}", flush=True)
    return found, seconds


def report(found: list[Contender], work: Workload, tunings: list[tuple[Tuning, float]]) -> Mapping:
    """Print the table and give it as JSON."""
    caps = [tuning.max_tokens for tuning, _ in tunings]
    autos = dict(zip(dict.fromkeys(caps), found, strict=False))
    best = max(found[len(autos) :], key=lambda contender: contender.speed.median)
    rows = [
        (
            contender.name,
            contender.speed.show(",.0f"),
            f"{contender.speed.median / best.speed.median:.2f}",
            f"{contender.plan.padding:.1%}",
            str(contender.plan.num_micro_batches),
            f"{predict_peak(work, contender.largest).peak_bytes / 2**20:,.0f} MiB",
            "<- best" if contender is best else "",
        )
        for contender in found
    ]
    header = ("split", "tokens/s", "of best", "padding", "micro-batches", "memory", "")
    print_table(header, rows)
    ratios = [autos[cap].speed.median / best.speed.median for cap in caps]
    near = sum(ratio * SLOWER >= 1 for ratio in ratios)
    verdict = "holds" if near >= SHARE * len(ratios) else "FAILS"
    foreign = max(contender.speed.foreign for contender in found)
    if foreign > MOST_FOREIGN:
        verdict = f"NOT KNOWN, since other programs took up to {foreign:.0%} of the machine"
    print(f"\nauto / best by hand: {', '.join(f'{ratio:.3f}' for ratio in ratios)}")
    print(f"{near} of {len(ratios)} tunings within {SLOWER - 1:.0%} of the best split: {verdict}")
    return {
        "caps": caps,
        "tuning_s": [seconds for _, seconds in tunings],
        "auto_over_best": ratios,
        "splits": {contender.name: contender.speed.to_json() for contender in found},
    }


def main() -> None:
    """Read the command line, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for flag, default in (
        ("--tunings", 1),
        ("--rounds", 5),
        ("--threads", 2),
        ("--global-batch", 64),
        ("--max-length", 512),
        ("--width", 256),
        ("--layers", 4),
        ("--largest", 16_384),
    ):
        parser.add_argument(flag, type=int, default=default)
    parser.add_argument("--busy", action="store_true", help="tune beside another program")
    parser.add_argument("--json", type=Path, default=FOLDER / "auto.json")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    torch.manual_seed(0)
    data = DataView(StdlibText(max_length=asked.max_length, overlong="cut"))
    model = GPT(
        vocab_size=data.facts.vocab_size,
        width=asked.width,
        num_layers=asked.layers,
        num_heads=4,
        max_length=asked.max_length,
    )
    longest = int(data.lengths.argmax())
    example = Loader(data, num_workers=0, seed=0).load(
        Request((longest,), 0, int(data.lengths[longest]))
    )
    work = Workload(
        model=Model(module=model, objective=NextToken(), spec=AdamW(lr=1e-3)),
        make_fields=Tiled(example, int(data.lengths[longest])),
    )
    order = np.random.default_rng(0).permutation(len(data))
    drawn = order[: 4 * asked.global_batch].reshape(4, -1)
    batches = [data.lengths[ids] for ids in drawn]
    with another_program(runs=asked.busy):
        tunings = [tune_once(work, data, batches) for _ in range(asked.tunings)]
    cuts = {
        t.max_tokens: Auto().tuned(t.max_tokens, t.cost, t.single_sample_cap) for t, _ in tunings
    }
    found = contenders(data, drawn[0], cuts, int(data.lengths[longest]), asked.largest)
    for _ in range(asked.rounds + 1):
        for contender in found:
            contender.run(work)
    for contender in found:  # the first round warms caches
        contender.speed = Figures(contender.speed.values[1:], contender.speed.timings[1:])
    write_results(asked.json, vars(asked), report(found, work, tunings))


if __name__ == "__main__":
    main()
