"""Harness 2: power is lost after any operation; the disk keeps any state POSIX permits.

After each: the last checkpoint whose save returned, or the one under way, loads bit for bit; no
name of a checkpoint shows a part of one; `keep` intact ones exist; `status.json` is whole. Then
the same is asked of protocols with one seeded mistake each, and every mistake must show.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from tests.lib.nightly import counts
from tests.reliability.power import ROOT, Operation, RecordingDisk, crash
from tests.reliability.support import KEEP, assert_is, cases, intact_steps, replay, save, state
from trainer.checkpoint.status import Status, write_status
from trainer.checkpoint.store import CheckpointStore
from trainer.core import durable
from trainer.core.errors import NoCheckpointError

LAST = 4
NUM_STATES = 300

Log = list[Operation]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Log:
    """Four saves of a run that keeps two, each with a status, as the disk saw them."""
    run = tmp_path_factory.mktemp("recorded")
    disk = RecordingDisk(run)
    with durable.use(disk):
        store = CheckpointStore(run / "checkpoints", KEEP)
        for step in range(1, LAST + 1):
            store.save(step, *state(step))
            disk.promise(("checkpoint", step))
            write_status(run, Status(state="running", step=step))
            disk.promise(("status", step))
    return disk.log


def last(log: Log, cut: int, kind: str) -> int:
    """The step of the last promise of a kind, 0 if there is none."""
    steps = [op.promise[1] for op in log[:cut] if op.kind == "done" and op.promise[0] == kind]
    return steps[-1] if steps else 0


def check(run: Path, log: Log, cut: int) -> None:
    """Hold a state after power loss against what had been promised by then."""
    saved, folder = last(log, cut, "checkpoint"), run / "checkpoints"
    intact = intact_steps(folder)
    assert len(intact) >= min(KEEP, saved), f"{intact} of {saved}"
    try:
        loaded = CheckpointStore(folder, KEEP).load()
    except NoCheckpointError:
        assert saved == 0
    else:
        assert not loaded.messages
        assert loaded.step in {saved, saved + 1}
        assert_is(loaded, loaded.step)
    noted, status = last(log, cut, "status"), run / "status.json"
    if status.exists():
        assert json.loads(status.read_bytes())["step"] in {noted, noted + 1}
    else:
        assert noted == 0


def violation(log: Log, case: int, chance: Random, run: Path) -> str | None:
    """Draw a crash, and say what is wrong with the state it leaves, if anything."""
    cut = chance.randint(0, len(log))
    shutil.rmtree(run, ignore_errors=True)
    crash(log, cut, chance, run)
    try:
        check(run, log, cut)
        if case % 10 == 0:
            save(run / "checkpoints", LAST + 1)
            assert_is(CheckpointStore(run / "checkpoints").load(), LAST + 1)
    except Exception as error:
        return f"after {cut} of {len(log)} operations: {error!r}"
    return None


@counts(NUM_STATES, 4000)
def test_no_state_after_power_loss_breaks_a_promise(count, log, tmp_path):
    for case, chance in cases(count):
        found = violation(log, case, chance, tmp_path / "run")
        assert found is None, f"{found}; {replay(case)}"


def named(log: Log, prefix: str) -> set[int]:
    return {op.node for op in log if op.kind == "enter" and op.name.startswith(prefix)}


def without(kind: str, prefix: str | None = None) -> Callable[[Log], Log]:
    """Leave out operations of a kind: all, or those on what has such a name."""

    def mutate(log: Log) -> Log:
        nodes = {op.node for op in log} if prefix is None else named(log, prefix) or {ROOT}
        return [op for op in log if op.kind != kind or op.node not in nodes]

    return mutate


def deleted_under_its_name(log: Log) -> Log:
    return [op for op in log if op.kind != "move" or not op.target.startswith(".trash")]


def renamed_before_the_manifest(log: Log) -> Log:
    early: Log = []
    for op in log:
        if op.kind == "move" and op.target.startswith("step-"):
            manifest = max(i for i, o in enumerate(early) if o.name == "manifest.json")
            early.insert(manifest, op)
        else:
            early.append(op)
    return early


def pruned_first(log: Log) -> Log:
    """Delete the old before the new is begun."""
    trash = {op.node for op in log if op.kind == "move" and op.target.startswith(".trash")}
    early: Log = []
    begin = 0
    for op in log:
        if op.kind == "enter" and op.name.startswith(".tmp-step"):
            begin = len(early)
        is_move = op.kind == "move" and op.target.startswith(".trash")
        if is_move or (op.kind == "leave" and trash & {op.folder, op.node}):
            early.insert(begin, op)
            begin += 1
        else:
            early.append(op)
    return early


def pruned_before_the_commit(log: Log) -> Log:
    """Sync the parent folder once, when the new has its name and the old is deleted."""
    pruned = {i for i, op in enumerate(log) if op.target.startswith(".trash")}
    early = {i - 1 for i in pruned} | {i + 1 for i in pruned}
    assert all(log[i].kind == "sync_folder" for i in early)
    late: Log = []
    for index, op in enumerate(log):
        if index not in early:
            late.append(op)
        if op.kind == "leave" and op.name.startswith(".trash"):
            late.append(Operation("sync_folder", op.folder))
    return late


def status_overwritten_in_place(log: Log) -> Log:
    """Write into the first status file again and again."""
    first, *later = sorted(named(log, ".tmp-status"))
    mutated: Log = []
    for op in log:
        if op.node not in later:
            mutated.append(op)
        elif op.kind == "enter":
            mutated.append(Operation("truncate", first))
        elif op.kind != "move":
            mutated.append(replace(op, node=first))
    return mutated


MUTANTS = {
    "no file is synced": without("sync"),
    "the manifest is not synced": without("sync", "manifest.json"),
    "the status is not synced": without("sync", ".tmp-status"),
    "no folder is synced": without("sync_folder"),
    "the new folder is not synced": without("sync_folder", ".tmp-step"),
    "the parent folder is not synced": without("sync_folder", "checkpoints"),
    "the run folder is not synced": without("sync_folder", "the root, which has no name"),
    "the rename comes before the manifest": renamed_before_the_manifest,
    "pruning comes first": pruned_first,
    "pruning does not wait for the commit": pruned_before_the_commit,
    "files are deleted under their name": deleted_under_its_name,
    "the status is overwritten in place": status_overwritten_in_place,
}


@pytest.mark.parametrize("mistake", MUTANTS)
def test_a_seeded_mistake_in_the_protocol_is_caught(mistake, log, tmp_path):
    mutated = MUTANTS[mistake](log)
    assert mutated != log
    found = (violation(mutated, *case, tmp_path / "run") for case in cases(NUM_STATES))
    assert any(found), f"{NUM_STATES} states did not show that {mistake}"
