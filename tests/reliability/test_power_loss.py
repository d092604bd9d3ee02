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

from tests.reliability.power import ROOT, Operation, RecordingDisk, crash, promised
from tests.reliability.support import KEEP, assert_is, cases, intact_steps, replay, save, state
from trainer.checkpoint.status import Status, write_status
from trainer.checkpoint.store import CheckpointStore
from trainer.core import durable
from trainer.core.errors import NoCheckpointError

LAST = 4
NUM_STATES = 300
NUM_STATES_NIGHTLY = 4000

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
    kept = [op.promise[1] for op in log[:cut] if op.kind == "done" and op.promise[0] == kind]
    return kept[-1] if kept else 0


def check(run: Path, log: Log, cut: int) -> None:
    """Hold a state after power loss against what had been promised by then."""
    saved, folder = last(log, cut, "checkpoint"), run / "checkpoints"
    kept = intact_steps(folder)
    assert len(kept) >= min(KEEP, saved), f"{kept} of {saved}"
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
            folder = run / "checkpoints"
            save(folder, LAST + 1)
            assert_is(CheckpointStore(folder).load(), LAST + 1)
    except Exception as error:
        return f"after {cut} of {len(log)} operations {promised(log, cut)}: {error!r}"
    return None


def hold_in_all_states(log: Log, run: Path, count: int) -> None:
    for case, chance in cases(count):
        found = violation(log, case, chance, run)
        assert found is None, f"{found}; {replay(case)}"


def test_no_state_after_power_loss_breaks_a_promise(log: Log, tmp_path: Path) -> None:
    hold_in_all_states(log, tmp_path / "run", NUM_STATES)


@pytest.mark.nightly
def test_none_of_thousands_of_states_after_power_loss_breaks_a_promise(
    log: Log, tmp_path: Path
) -> None:
    hold_in_all_states(log, tmp_path / "run", NUM_STATES_NIGHTLY)


def nodes_named(log: Log, prefix: str) -> set[int]:
    return {op.node for op in log if op.kind == "enter" and op.name.startswith(prefix)}


def without(log: Log, drop: Callable[[Operation], bool]) -> Log:
    return [op for op in log if not drop(op)]


def no_file_is_synced(log: Log) -> Log:
    return without(log, lambda op: op.kind == "sync")


def the_manifest_is_not_synced(log: Log) -> Log:
    manifests = nodes_named(log, "manifest.json")
    return without(log, lambda op: op.kind == "sync" and op.node in manifests)


def the_status_is_not_synced(log: Log) -> Log:
    statuses = nodes_named(log, ".tmp-status")
    return without(log, lambda op: op.kind == "sync" and op.node in statuses)


def no_folder_is_synced(log: Log) -> Log:
    return without(log, lambda op: op.kind == "sync_folder")


def the_new_folder_is_not_synced(log: Log) -> Log:
    folders = nodes_named(log, ".tmp-step")
    return without(log, lambda op: op.kind == "sync_folder" and op.node in folders)


def the_parent_folder_is_not_synced(log: Log) -> Log:
    parents = nodes_named(log, "checkpoints")
    return without(log, lambda op: op.kind == "sync_folder" and op.node in parents)


def the_run_folder_is_not_synced(log: Log) -> Log:
    return without(log, lambda op: op.kind == "sync_folder" and op.node == ROOT)


def the_rename_comes_before_the_manifest(log: Log) -> Log:
    early: Log = []
    for op in log:
        if op.kind == "move" and op.target.startswith("step-"):
            manifest = max(i for i, o in enumerate(early) if o.name == "manifest.json")
            early.insert(manifest, op)
        else:
            early.append(op)
    return early


def is_pruning(log: Log) -> Callable[[Operation], bool]:
    """Tell the operations that delete the pruned checkpoints, the first rename excepted."""
    moved = {op.node for op in log if op.kind == "move" and op.target.startswith(".trash")}
    return lambda op: (
        (op.kind == "leave" and (op.folder in moved or op.node in moved))
        or (op.kind == "move" and op.target.startswith(".trash"))
    )


def pruning_comes_first(log: Log) -> Log:
    """Delete the old before the new is begun."""
    prunes = is_pruning(log)
    early: Log = []
    begin = 0
    for op in log:
        if op.kind == "enter" and op.name.startswith(".tmp-step"):
            begin = len(early)
        if prunes(op):
            early.insert(begin, op)
            begin += 1
        else:
            early.append(op)
    return early


def pruning_does_not_wait_for_the_commit(log: Log) -> Log:
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


def files_are_deleted_under_their_name(log: Log) -> Log:
    return without(log, lambda op: op.kind == "move" and op.target.startswith(".trash"))


def the_status_is_overwritten_in_place(log: Log) -> Log:
    """Write into the first status file again and again."""
    statuses = sorted(nodes_named(log, ".tmp-status"))
    first, later = statuses[0], set(statuses[1:])
    mutated: Log = []
    for op in log:
        if op.node not in later:
            mutated.append(op)
        elif op.kind == "enter":
            mutated.append(Operation("truncate", first))
        elif op.kind != "move":
            mutated.append(replace(op, node=first))
    return mutated


MUTANTS = [
    no_file_is_synced,
    the_manifest_is_not_synced,
    the_status_is_not_synced,
    no_folder_is_synced,
    the_new_folder_is_not_synced,
    the_parent_folder_is_not_synced,
    the_run_folder_is_not_synced,
    the_rename_comes_before_the_manifest,
    pruning_comes_first,
    pruning_does_not_wait_for_the_commit,
    files_are_deleted_under_their_name,
    the_status_is_overwritten_in_place,
]


@pytest.mark.parametrize("mutate", MUTANTS)
def test_a_seeded_mistake_in_the_protocol_is_caught(
    mutate: Callable[[Log], Log], log: Log, tmp_path: Path
) -> None:
    mutated = mutate(log)
    assert mutated != log
    for case, chance in cases(NUM_STATES):
        if (found := violation(mutated, case, chance, tmp_path / "run")) is not None:
            print(f"caught in state {case}: {found}")
            return
    pytest.fail(f"{NUM_STATES} states did not show that {mutate.__name__.replace('_', ' ')}")
