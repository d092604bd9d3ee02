"""What ranks reduce is compared with one process's gradient, and what is lost is found."""

from contextlib import closing

import pytest

from tests.lib.nightly import nightly
from tests.lib.ranks_support import Ranks
from tests.lib.ranks_work import MODES, Case, bench_of
from trainer.core.world import World
from trainer.parallel.base import Replicated
from trainer.plan.cuts import Fixed
from trainer.verify.reduced import ReducedError, compare_reduced


class Lossy(Replicated):
    """Leaves a part of the gradient unreduced."""

    def reduce(self, used):
        super().reduce([*used[:-1], False])


class Averaging(Replicated):
    """Divides by the number of ranks, as reducers do unless told not to."""

    def reduce(self, used):
        super().reduce(used)
        self.scale_gradients(1 / self.world.size)


def compared(world: World, mode: str, sync: str) -> ReducedError | None:
    def lay_out(module, _):
        kind = {"lossy": Lossy, "averaging": Averaging}.get(mode)
        if kind is None:
            return MODES[mode](module, world)
        return kind(module, MODES["ddp"](module, world).call, [*module.parameters()], world)

    bench = bench_of(World(), Case(Fixed(micro=2), sync=sync))
    return compare_reduced(bench.context, bench.feed.next(), bench.feed, lay_out, world)


@pytest.mark.parametrize(
    ("mode", "sync", "size"),
    [
        *(("ddp", "overlapped", 3), ("ddp", "immediate", 2), ("fsdp", "immediate", 2)),
        *(("ordered", "deferred", 2), nightly("hsdp", "hierarchical", 4)),
    ],
)
def test_what_ranks_reduce_is_the_gradient_of_one_process(mode, sync, size):
    # DTensor remembers meshes of process groups that are gone, so these ranks are new.
    with closing(Ranks()) as ranks:
        for found in ranks.run(size, compared, mode, sync):
            assert found.is_exact
            # In lockstep four ranks have one each of the six micro-batches of two samples.
            assert found.num_samples == (8 if size == 4 else 12)


@pytest.mark.parametrize("mode", ["lossy", "averaging"])
def test_a_layout_that_loses_a_part_of_the_gradient_is_not_exact(ranks, mode):
    for found in ranks.run(2, compared, mode, "deferred"):
        assert not found.is_exact
        assert found.error > 1e-3
