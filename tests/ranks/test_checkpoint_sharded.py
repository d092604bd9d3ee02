"""State sharded over ranks: each stores and reads its own rows, and any number of ranks goes on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from itertools import chain, pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from tests.lib.checkpoint_work import (
    Layout,
    begun,
    initial,
    passed_on,
    peaks,
    read,
    refused,
)
from tests.lib.ranks_support import Ranks
from tests.reliability.test_hostile_checkpoints import sign
from trainer.checkpoint import tensor_files
from trainer.checkpoint.integrity import share, verify
from trainer.checkpoint.manifest import Entry, Slice
from trainer.checkpoint.rank_pieces import Piece
from trainer.checkpoint.store import CheckpointStore
from trainer.checkpoint.tensor_reader import stored_in
from trainer.checkpoint.weights import export
from trainer.core.errors import NoCheckpointError, SaveError
from trainer.core.world import World

ALONE = Layout(1, "none")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    group = Ranks()
    yield group
    group.close()


def on(ranks: Ranks, layout: Layout, work, *args):
    """What every rank of a layout gave; one rank alone needs no process of its own."""
    if layout.size == 1:
        return [work(World(), layout, *args)]
    return ranks.run(layout.size, work, layout, *args)


CHAINS = {
    "adamw": [Layout(2, "fsdp"), ALONE, Layout(4, "hsdp"), Layout(3, "fsdp"), Layout(2, "ddp")],
    "adamw again": [Layout(2, "ddp"), Layout(4, "fsdp"), Layout(2, "fsdp"), Layout(4, "hsdp")],
    "momentum": [Layout(3, "fsdp"), ALONE, Layout(2, "fsdp")],
}


@pytest.mark.parametrize("case", CHAINS)
def test_every_layout_goes_on_from_every_other_bit_for_bit(ranks, case, tmp_path):
    layouts, kind = CHAINS[case], case.partition(" ")[0]
    saved, *others = on(ranks, layouts[0], begun, kind, tmp_path)
    assert all(other == saved for other in others)
    assert len(saved) > 20
    for step, layout in enumerate(layouts[1:], start=1):
        for found, is_tied in on(ranks, layout, passed_on, kind, tmp_path, step):
            assert found == saved, f"step {step}, {layout}"
            assert is_tied
    assert CheckpointStore(tmp_path).steps() == list(range(1, len(layouts) + 1))


def test_each_rank_writes_its_own_rows_and_whole_tensors_are_written_once(ranks, tmp_path):
    on(ranks, Layout(4, "hsdp"), begun, "adamw", tmp_path)
    path = CheckpointStore(tmp_path).path(1)
    body = json.loads((path / "manifest.json").read_bytes())
    assert body["tensors"]["model.mark"] == {
        "shape": [3],
        "dtype": "BF16",
        "file": "model.safetensors",
    }
    assert body["tensors"]["model.row"]["file"] == "model.safetensors"  # one rank has all of it
    assert body["aliases"] == {"model.head.weight": "model.embed.weight"}
    slices = body["tensors"]["optimizer.embed.weight.exp_avg"]["slices"]
    assert [each["rows"] for each in slices] == [[0, 4], [4, 7]]
    for each in slices:
        file = safe_open(path / each["file"], "pt")
        start, stop = each["rows"]
        assert file.get_slice("optimizer.embed.weight.exp_avg").get_shape() == [stop - start, 5]
    sizes = {
        rank: sum(content["size"] for name, content in body["files"].items() if rank in name)
        for rank in ("rank-00000", "rank-00001", "rank-00002", "rank-00003")
    }
    assert max(sizes.values()) < 1.3 * min(sizes.values()), "replicas share the work"


def test_weights_alone_are_taken_from_slices_and_from_files(ranks, tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    saved = on(ranks, Layout(3, "fsdp"), begun, "adamw", folder)[0]
    loaded = CheckpointStore(folder).load()
    exported = export(loaded, tmp_path / "exported", {})
    weights = {name: told for name, told in saved.items() if name.startswith("model.")}
    for path in (tmp_path / "run", loaded.path, exported):
        for layout in (ALONE, Layout(2, "fsdp")):
            for found in on(ranks, layout, initial, path):
                assert weights.items() <= found.items(), (path, layout)


WHY = {
    "disk": "step-00000001: could not be written: No space left on device",
    "state": "not saved: model.embed.weight, model.head.weight not finite",
}


@pytest.mark.parametrize("where", WHY)
def test_what_fails_on_one_rank_is_refused_on_all_and_leaves_nothing(ranks, where, tmp_path):
    said = ranks.run(3, refused, tmp_path, where)
    assert said[0] == said[1] == said[2]
    assert len(said[0]) == 2, "directly, and behind the steps"
    for text in said[0]:
        assert WHY[where] in text
    assert list(tmp_path.iterdir()) == []


def test_ranks_share_the_verification_and_agree_on_damage(ranks, tmp_path):
    on(ranks, ALONE, begun, "adamw", tmp_path)
    path = CheckpointStore(tmp_path).path(1)
    assert ranks.run(3, read, tmp_path) == [(1, ())] * 3
    for name in ("model", "optimizer", "state"):
        file = path / f"{name}.safetensors"
        whole = file.read_bytes()
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        told = ranks.run(3, read, tmp_path)
        assert told[0] == told[1] == told[2]
        assert f"{name}.safetensors does not match its SHA-256" in told[0][0]
        (tmp_path / f"damaged-{path.name}").rename(path)
        file.write_bytes(whole)
    hashed = [share(verify(path), rank, 3) for rank in range(3)]
    assert sorted(chain.from_iterable(hashed)) == sorted(verify(path).files)
    assert all(len(names) == 1 for names in hashed)


def test_saving_and_loading_need_a_shard_and_one_tensor_and_never_the_whole(ranks, tmp_path):
    saved = {"one": ranks.run(1, peaks, tmp_path / "one", "whole")[0]["digest"]}
    for how, source in (("direct", "four"), ("load", "four"), ("load", "one"), ("behind", "two")):
        for told in ranks.run(4, peaks, tmp_path / source, how):
            extra = told["peak"] - told["shard"]
            copy = told["shard"] if how == "behind" else 0
            assert extra <= copy + told["largest"] < told["whole"] / 2, (how, source)
            assert saved.setdefault(source, told["digest"]) == told["digest"]


ROWS = 6


@given(cuts=st.sets(st.integers(1, ROWS - 1)), ends=st.tuples(*[st.integers(0, ROWS)] * 2))
def test_any_rows_are_read_from_any_slices(cuts, ends, tmp_path_factory):
    tensors = {
        "model.a": torch.arange(ROWS * 2.0).reshape(ROWS, 2),
        "optimizer.b": torch.arange(ROWS),
        "model.none": torch.zeros(ROWS, 0),
    }
    bounds = [0, *sorted(cuts), ROWS]
    folder = tmp_path_factory.mktemp("slices")
    for rank, (start, stop) in enumerate(pairwise(bounds)):
        own = {n: Piece(t.shape, t.dtype, t[start:stop], start) for n, t in tensors.items()}
        tensor_files.write(folder, own, rank=rank)
    entries = {
        name: Entry(
            tuple(tensor.shape),
            tensor_files.DTYPES[tensor.dtype],
            tuple(
                Slice(file_of(name, rank, len(bounds) == 2), start, stop)
                for rank, (start, stop) in enumerate(pairwise(bounds))
            ),
        )
        for name, tensor in tensors.items()
    }
    stored, _ = stored_in(folder, entries, {})
    start, stop = sorted(ends)
    for name, tensor in tensors.items():
        assert torch.equal(stored[name][...], tensor)
        assert torch.equal(stored[name][start:stop], tensor[start:stop])


def file_of(name: str, rank: int, is_whole: bool) -> str:
    head = name.partition(".")[0]
    return f"{head}.safetensors" if is_whole else f"{head}-rank-{rank:05d}.safetensors"


def a_gap(slices):
    slices[1]["rows"][0] += 1


def an_overlap(slices):
    slices[1]["rows"][0] -= 1


def another_order(slices):
    slices.reverse()


def too_short(slices):
    slices.pop()


def too_long(slices):
    slices[1]["rows"][1] += 1


def no_slices(slices):
    slices.clear()


def an_empty_one(slices):
    slices.insert(0, {**slices[0], "rows": [0, 0]})


def twice_the_same_file(slices):
    slices[1]["file"] = slices[0]["file"]


def moved(slices):
    slices[0]["file"], slices[1]["file"] = slices[1]["file"], slices[0]["file"]


def another_cut(slices):
    slices[0]["rows"][1] = slices[1]["rows"][0] = 3


def from_behind(slices):
    slices[0]["rows"] = [-4, 4]


def no_numbers(slices):
    slices[0]["rows"] = "04"


@pytest.fixture(scope="module")
def sliced(ranks, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sliced")
    on(ranks, Layout(2, "fsdp"), begun, "momentum", folder)
    return folder


@pytest.mark.parametrize(
    "change",
    [
        a_gap,
        an_overlap,
        another_order,
        too_short,
        too_long,
        no_slices,
        an_empty_one,
        twice_the_same_file,
        moved,
        another_cut,
        from_behind,
        no_numbers,
    ],
)
def test_signed_slices_that_are_not_the_rows_of_their_tensor_are_refused(change, sliced, tmp_path):
    shutil.copytree(sliced, tmp_path / "checkpoints")
    path = tmp_path / "checkpoints" / "step-00000001"
    sign(path, lambda body: change(body["tensors"]["model.embed.weight"]["slices"]))
    with pytest.raises(NoCheckpointError, match="damaged"):
        CheckpointStore(path.parent).load()


@pytest.mark.parametrize("lost", ["model-rank-00000", "model-rank-00001"])
def test_a_slice_that_is_missing_or_of_another_checkpoint_is_damage(lost, sliced, tmp_path):
    shutil.copytree(sliced, tmp_path / "checkpoints")
    path = tmp_path / "checkpoints" / "step-00000001" / f"{lost}.safetensors"
    other = path.with_name(f"model-rank-0000{1 - int(lost[-1])}.safetensors")
    whole = path.read_bytes()
    for damage in (path.unlink, lambda: path.write_bytes(other.read_bytes())):
        damage()
        with pytest.raises(NoCheckpointError, match=lost):
            CheckpointStore(tmp_path / "checkpoints").load(set_aside=False)
        path.write_bytes(whole)
    assert CheckpointStore(tmp_path / "checkpoints").load().step == 1


def test_the_same_state_in_other_slices_is_the_same_state(ranks, sliced, tmp_path):
    shutil.copytree(sliced, tmp_path / "checkpoints")
    store = CheckpointStore(tmp_path / "checkpoints")
    before = (store.path(1) / "manifest.json").read_bytes()
    loaded = store.load()
    whole = {n: t.clone() for n, t in loaded.tensors.items() if n not in loaded.aliases}
    whole |= {alias: whole[name] for alias, name in loaded.aliases.items()}
    assert store.save(1, whole, {}) == store.path(1)
    whole["model.frozen"][3, 3] += 1
    with pytest.raises(SaveError, match="never overwritten"):
        store.save(1, whole, {})
    assert (store.path(1) / "manifest.json").read_bytes() == before
