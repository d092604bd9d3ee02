"""Add to `train plan` what many ranks cost, where `network` or `checkpoint.bandwidth` is typed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import final

from trainer.assemble.features import Feature
from trainer.assemble.run_plan import RunPlan
from trainer.config.amounts import parse_bandwidth
from trainer.config.run_config import RunConfig
from trainer.core.format import duration, plural, size
from trainer.core.rows import Row, join_parts, row
from trainer.features.large import costs
from trainer.parallel.setup import SHARDED


@final
class EstimateAtLarge(Feature):
    """Estimates steps, start and checkpoints of ranks that are not here."""

    def __init__(self, network: str | None = None, storage: str | None = None) -> None:
        self._network, self._storage = network, storage

    @classmethod
    def of(cls, config: RunConfig) -> EstimateAtLarge:
        """See the base class."""
        return cls(config.network, config.checkpoint.bandwidth)

    def rows(self, run_plan: RunPlan) -> Sequence[Row]:
        """See the base class."""
        run = run_plan.run
        ranks, setup = run.world.size, run.model.setup
        if self._network is None and self._storage is None:
            return []
        sent, writers = 0.0, ranks if setup.mode in SHARDED else 1
        for each in setup.rows:
            if each.policy == setup.sync.name:
                # Shards of hsdp are of one host, with links of its own.
                sent = each.across if setup.mode == "hsdp" else each.sent
        state_bytes = _state_bytes(run_plan)
        # In lockstep blocks are gathered ahead.
        overlaps = setup.sync.overlaps or setup.sync.lockstep
        found = costs.estimate(
            ranks=ranks,
            compute_s=run_plan.step_seconds,
            sent=sent,
            network=parse_bandwidth(self._network or ""),
            overlaps=overlaps,
            state_bytes=state_bytes,
            storage=parse_bandwidth(self._storage or ""),
            writers=writers,
        )
        step = "time of a step unknown: needs network=, and device= with the name of a card"
        if found.step_s is not None:
            step = f"about {duration(found.step_s)} a step, bound by {found.bound}"
        network, written = None, "type checkpoint.bandwidth=50GB/s for its seconds"
        if found.network_s is not None:
            when = "meanwhile" if overlaps else "then"
            rate = f"{size(sent)} at {self._network}"
            network = f"{when} the network {duration(found.network_s)} ({rate})"
        if found.checkpoint_s is not None:
            written = f"{duration(found.checkpoint_s)} at {self._storage}"
        compute = found.compute_s and f"computing {duration(found.compute_s)}"
        agreed = f"agreement of hosts {duration(found.agree_s)}"
        start = f"ranks find each other in about {duration(found.join_s)}, and compare settings in "
        return [
            row("at large", f"{plural(ranks, 'rank')}: {step}", at_large=asdict(found)),
            row("a step", join_parts(compute, network, agreed)),
            row("the start", f"{start}{duration(found.gather_s)}; {costs.ORIGIN}"),
            row("checkpoint", f"{size(state_bytes)}: {written}", checkpoint_bytes=state_bytes),
        ]


def _state_bytes(run_plan: RunPlan) -> int:
    """Count what a checkpoint holds: trained weights, buffers, optimizer state and average."""
    run, predicted = run_plan.run, run_plan.predicted
    module, setup = run.model.module, run.model.setup
    tensors = [p for p in module.parameters() if p.requires_grad] + [*module.buffers()]
    found = sum(each.nbytes for each in tensors)
    # A rank has its shard of the optimizer's.
    shards = run.world.size // setup.replicas if setup.mode in SHARDED else 1
    if predicted is not None:
        found += shards * (predicted.optimizer_state + predicted.average)
    return found
