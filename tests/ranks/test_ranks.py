"""Every layout over real ranks takes the very step that one rank would take."""

import math
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.lib.nightly import nightly, slow
from tests.lib.predict_toys import lines_of
from tests.lib.ranks_support import Ranks
from tests.lib.ranks_work import (
    Case,
    count_collectives,
    count_looks,
    error,
    evaluated,
    moved_each,
    norm_and_share,
    predicted,
    run_each,
    run_steps,
    scored,
    share,
    sum_in_integers,
    what_is_refused,
)
from tests.lib.support import EXACT
from trainer.core.world import World
from trainer.plan.cuts import Budget, Fixed, LayoutInvariant
from trainer.training.checkpointing import Checkpointer
from trainer.training.step import NOT_FINITE

WAYS = [
    *(("small buckets", "overlapped", 2), nightly("ddp", "overlapped", 4)),
    *(nightly("ddp", "deferred", 3), nightly("small buckets", "deferred", 2)),
    nightly("hsdp", "deferred", 4),
    *(("fsdp", "immediate", 3), ("hsdp", "hierarchical", 4)),
    *(nightly(mode, "deferred", size) for mode in ("ddp", "fsdp") for size in (2, 4)),
    *(nightly("fsdp", "deferred", 3), nightly("ddp", "immediate", 2)),
]
WINDOWS = {"deferred", "overlapped"}  # whose ranks need not have as many micro-batches
SHARDS = ["fsdp", nightly("ddp")]
ALONE: dict[str, dict[str, Any]] = {}


def alone(case: Case) -> dict[str, Any]:
    """The same run on one rank, with the whole batch in one micro-batch."""
    case = replace(case, cut=Fixed(steps=1), mode="ddp", sync="deferred", variant="")
    key = repr(case)
    if key not in ALONE:
        ALONE[key] = run_steps(World(), case)
    return ALONE[key]


@pytest.mark.parametrize(("mode", "sync", "size"), WAYS)
def test_gradients_are_those_of_the_whole_batch_on_one_rank(ranks, mode, sync, size):
    few = Case(Fixed(micro=1), mode, sync, global_batch=3, variant="recomputing")
    first = alone(few)["ids"][0][0]
    cases = [
        # One parameter is used by one rank alone, and one by none.
        Case(Fixed(micro=3), mode, sync, spare=True),
        Case(Budget(max_tokens=40), mode, sync, dtype=torch.float32, gives_objects=True),
        # A rank has nothing but a sample without labels, and of four ranks one has no sample.
        replace(few, masked=(first,)),
    ]
    assert alone(cases[0])["gradient"]["idle"] is None
    assert alone(cases[0])["gradient"]["spare"] is not None
    answers = ranks.run(size, run_each, cases)
    assert (0 in [each[2]["counts"][0] for each in answers]) == (size == 4 and sync in WINDOWS)
    for each in answers:
        for case, answer in zip(cases, each, strict=True):
            expected, exact = alone(case), EXACT[case.dtype]
            assert error(answer["gradient"], expected["gradient"]) <= exact
            assert answer["ids"] == expected["ids"]
            assert answer["loss"] == pytest.approx(expected["loss"], rel=exact)
            assert answer["norm"] == pytest.approx(expected["norm"], rel=exact)


@pytest.mark.parametrize("mode", ["fsdp", nightly("ddp"), nightly("hsdp")])
def test_gradients_of_any_type_are_clipped_by_a_norm_in_fp64(mode):
    size = 4 if mode == "hsdp" else 2
    # DTensor remembers meshes of process groups that are gone, so these ranks are new.
    with closing(Ranks()) as ranks:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for norm, exact, is_nearest in ranks.run(size, norm_and_share, mode, dtype):
                assert norm == pytest.approx(exact, rel=1e-13)
                assert is_nearest or dtype == torch.float32


@pytest.mark.parametrize("mode", SHARDS)
def test_clipping_and_several_steps_agree_over_ranks(ranks, mode):
    case = Case(Budget(max_tokens=40), mode, steps=4, clip_norm=0.05)
    expected, answer = alone(case), ranks.run(3, run_steps, case)
    for mine in answer:
        assert mine["ids"] == expected["ids"]
        assert mine["loss"] == pytest.approx(expected["loss"], rel=1e-9)
        assert mine["norm"] == pytest.approx(expected["norm"], rel=1e-8)
        # AdamW divides by the square root of a tiny second moment, which magnifies rounding.
        for name in ("gradient", "last gradient", "parameters"):
            assert error(mine[name], expected[name]) <= 1e-7
        assert error(mine["parameters"], answer[0]["parameters"]) == 0


GROUPS = 4  # three blocks and the rest
ONE_LEVEL = ("deferred", "immediate")
EVERY_STEP = ("the normalizer", "what hosts agree on", "the loss and metrics of the devices")
NORM_OF_SHARDS = ("the gradient norm",)
COUNTED = [
    *(("ddp", "deferred", 2), ("fsdp", "immediate", 2), ("hsdp", "hierarchical", 4)),
    *(nightly("ddp", "immediate", 2), nightly("fsdp", "deferred", 2)),
    *(nightly("hsdp", sync, 4) for sync in ONE_LEVEL),
    *(nightly(mode, sync, n) for mode in ("ddp", "fsdp") for sync in ONE_LEVEL for n in (3, 4)),
]


def collectives_of_a_step(mode: str, sync: str, micro_batches: int) -> dict[str, int]:
    """The table: what a step sends, with all that is sent beside gradients and parameters."""
    reductions = 1 if sync == "deferred" else micro_batches
    if mode == "ddp":
        return {"allreduce": len(EVERY_STEP) + reductions}
    # Without a window blocks are gathered for forward and again for backward, the root once.
    gathers = GROUPS if sync == "deferred" else micro_batches * (2 * GROUPS - 1)
    between_copies = {"fsdp": 0, "hsdp": 1 if sync == "hierarchical" else reductions}[mode]
    return {
        "gather": gathers,
        "reduce_scatter": reductions * GROUPS,
        "allreduce": len(EVERY_STEP + NORM_OF_SHARDS) + between_copies * GROUPS,
    }


@pytest.mark.parametrize(("mode", "sync", "size"), COUNTED)
def test_collectives_of_a_step_are_as_many_as_the_table_says(ranks, mode, sync, size):
    for counts in ranks.run(size, count_collectives, Case(Fixed(micro=2), mode, sync)):
        micro_batches = counts.pop("micro_batches")
        assert micro_batches >= 2
        assert counts == collectives_of_a_step(mode, sync, micro_batches)


@pytest.mark.parametrize("mode", ["fsdp", slow("ddp")])
def test_the_host_of_every_rank_looks_at_its_device_once_a_step(ranks, mode):
    for found in ranks.run(2, count_looks, Case(Fixed(micro=2), mode, clip_norm=0.1)):
        assert found == ["__bool__"]


def test_a_block_that_one_rank_skips_is_refused_by_name_on_all_in_lockstep(ranks):
    case = Case(Fixed(micro=3), "fsdp", "immediate", skipped=1)
    for code, line in ranks.run(3, what_is_refused, case):
        assert code == 2
        assert line.startswith("sync: rank 2 reaches blocks.2 where rank 0 reaches blocks.1: ")


@pytest.mark.nightly
def test_a_compiled_model_in_shards_takes_the_same_steps_under_every_policy():
    plain = Case(Fixed(micro=3), "fsdp", steps=2)
    cases = [replace(plain, variant="compiled", sync=sync) for sync in ONE_LEVEL]
    with closing(Ranks()) as ranks:
        expected = ranks.run(2, run_steps, plain)[0]["parameters"]
        for found in (found for each in ranks.run(2, run_each, cases) for found in each):
            for name, value in expected.items():
                np.testing.assert_allclose(
                    found["parameters"][name], value, rtol=EXACT[torch.float64], atol=1e-13
                )


SAME = Case(
    LayoutInvariant(micro=2),
    "ordered",
    dtype=torch.float32,
    steps=8,
    dropout=0.2,
    clip_norm=0.5,
)


@pytest.mark.parametrize("size", [2, nightly(3), nightly(4)])
def test_deterministic_layout_gives_the_same_bits_on_every_number_of_ranks(ranks, size):
    expected = run_steps(World(), SAME)
    for answer in ranks.run(size, run_steps, SAME):
        assert error(answer["parameters"], expected["parameters"]) == 0
        assert answer["loss"] == expected["loss"]
        assert answer["norm"] == expected["norm"]


def test_without_it_the_bits_differ(ranks):
    case = replace(SAME, mode="ddp", sync="deferred")
    expected = run_steps(World(), case)
    assert error(ranks.run(2, run_steps, case)[0]["parameters"], expected["parameters"]) > 0


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sums_of_integers_hold_every_finite_gradient_in_the_same_bits_for_every_layout(
    ranks, dtype
):
    numbers, limits = np.random.default_rng(0), np.finfo(dtype)
    shape, lowest, highest = (7, 600), limits.minexp - limits.nmant, limits.maxexp - 4
    exponents = numbers.integers(lowest, highest, shape)
    exponents[:, 300:] = exponents[0, 300:]  # the half whose micro-batches are of one size
    gradients = np.ldexp(numbers.uniform(-1, 1, shape), exponents).astype(dtype)
    gradients[numbers.random(shape) < 0.1] = 0
    expected = sum_in_integers(World(), gradients)
    exact = np.array([math.fsum(column) for column in gradients.T.astype(np.float64)])
    # Each micro-batch is cut off below the largest, and the sum is rounded once.
    bound = 7 * (2.0**-32 if dtype == np.float32 else 2.0**-64) * np.abs(gradients).max(0)
    rounding = limits.eps * np.abs(exact) + limits.smallest_subnormal
    assert (np.abs(expected - exact) <= bound + rounding).all()
    for size in (2, 3, 4):
        for answer in ranks.run(size, sum_in_integers, gradients):
            assert answer.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    "case", [Case(Fixed(micro=3), "fsdp"), SAME, nightly(Case(Fixed(micro=3)))], ids=str
)
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all(ranks, case):
    answer = ranks.run(2, run_steps, replace(case, steps=2, poisoned=1))
    for mine in answer:
        assert mine["skipped"] == [NOT_FINITE, None]
        assert error(mine["parameters"], answer[0]["parameters"]) == 0


@pytest.mark.parametrize("mode", SHARDS)
def test_evaluation_visits_every_held_out_sample_once_and_is_exact(ranks, mode):
    for num_held_out in (2, 29):
        expected, _, _ = evaluated(World(), mode, num_held_out)
        found = ranks.run(3, evaluated, mode, num_held_out)
        assert sorted(i for _, seen, _ in found for i in seen) == list(range(num_held_out))
        for metrics, _, _ in found:
            assert metrics == pytest.approx(expected, rel=1e-12)
            assert {"perplexity", "f1", "mcc"} < metrics.keys()


@pytest.mark.parametrize("mode", SHARDS)
def test_every_rank_has_the_predictions_of_one_to_the_bit(ranks, mode):
    expected = predicted(World(), mode, 29)
    assert [line["id"] for line in expected] == list(range(29))
    assert all(found == expected for found in ranks.run(3, predicted, mode, 29))


@pytest.mark.parametrize("mode", SHARDS)
def test_a_score_of_answers_depends_on_neither_ranks_nor_cut(ranks, mode):
    (means, lines), (_, other_cut) = (scored(World(), mode, 29, cap) for cap in (30, 200))
    assert lines == other_cut
    assert sum(bool(line.get("prediction")) for line in lines) > 10
    for theirs, found in ranks.run(3, scored, mode, 29, 30):
        assert found == lines
        assert theirs["order"] == means["order"]
        assert theirs["loss"] == pytest.approx(means["loss"], rel=1e-12)


def test_several_ranks_predict_the_records_that_one_does(ranks):
    expected = lines_of(World())
    assert [line["id"] for line in expected] == list(range(7))
    assert all(found == expected for found in ranks.run(3, lines_of))


def test_state_that_forwards_move_is_the_main_ranks_on_all_after_each_step(ranks):
    pairs = (("ddp", "deferred"), ("fsdp", "deferred"), ("fsdp", "immediate"))
    cases = [Case(Fixed(micro=2), *pair, steps=2) for pair in pairs]
    first, *others = ranks.run(3, moved_each, cases)
    for number in range(len(cases)):
        state = first[number]
        # In lockstep the main rank has a micro-batch without samples, of which there is no mean.
        assert np.isfinite(state["books.mean"]).all()
        assert state["books.mean"].any()
        cached = [state.pop("books.cache").size]
        for other in others:
            theirs = other[number]
            cached.append(theirs.pop("books.cache").size)
            assert theirs.keys() == state.keys()
            assert all(np.array_equal(theirs[name], state[name]) for name in state)
        assert len(set(cached)) > 1


def test_ranks_share_values_of_any_size_and_what_fails_on_the_main_one(ranks):
    everything = [{"rank": rank, "text": "x" * rank} for rank in range(3)]
    assert ranks.run(3, share) == [(everything, "disk full 8")] * 3


def due(world: World) -> bool:
    """Whether a rank is to save, by a clock that the first rank alone has."""
    others: Any = {"module": nn.Linear(1, 1), "parts": {}, "reporter": None}
    every_s, writer = 0.0 if world.is_main else None, SimpleNamespace(has_result=False)
    checkpointer = Checkpointer(world=world, writer=writer, every_s=every_s, **others)
    assert not checkpointer.poll(False)
    return checkpointer.is_due


def test_a_checkpoint_that_is_due_by_time_is_so_on_every_rank(ranks):
    assert ranks.run(2, due) == [True, True]
