"""State sharded over ranks: each stores and reads its own rows, and any number of ranks goes on."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.lib.checkpoint_work import Layout, begun, initial, passed_on, peaks, read, refused
from tests.lib.nightly import nightly
from tests.lib.ranks_support import Ranks
from trainer.checkpoint.manifest import DamagedError, verify
from trainer.checkpoint.store import CheckpointStore
from trainer.checkpoint.tensor_files import open_tensors, write_tensors
from trainer.checkpoint.weights import export
from trainer.core.errors import NoCheckpointError
from trainer.core.world import World

ALONE = Layout(1, "none")


def on(ranks: Ranks, layout: Layout, work, *args):
    """What every rank of a layout gave; one rank alone needs no process of its own."""
    if layout.size == 1:
        return [work(World(), layout, *args)]
    return ranks.run(layout.size, work, layout, *args)


@pytest.mark.parametrize(
    "layouts",
    [
        [Layout(2, "fsdp"), ALONE, Layout(4, "hsdp"), Layout(3, "fsdp"), Layout(2, "ddp")],
        nightly([Layout(2, "ddp"), Layout(4, "fsdp"), Layout(2, "fsdp"), Layout(4, "hsdp")]),
    ],
    ids=len,
)
def test_every_layout_goes_on_from_every_other_bit_for_bit(ranks, layouts, tmp_path):
    saved, *others = on(ranks, layouts[0], begun, tmp_path)
    assert all(other == saved for other in others)
    assert len(saved) > 20
    for step, layout in enumerate(layouts[1:], start=1):
        for found, is_tied in on(ranks, layout, passed_on, tmp_path, step):
            assert found == saved, f"step {step}, {layout}"
            assert is_tied
    assert CheckpointStore(tmp_path).steps() == list(range(1, len(layouts) + 1))


def test_each_rank_writes_its_own_rows_and_whole_tensors_are_written_once(ranks, tmp_path):
    on(ranks, Layout(4, "hsdp"), begun, tmp_path)
    path = CheckpointStore(tmp_path).path(1)
    body = json.loads((path / "manifest.json").read_bytes())
    assert "model.mark" in load_file(path / "model.safetensors")
    found = {file.name: load_file(file) for file in sorted(path.glob("*-rank-*.safetensors"))}
    moment = "optimizer.embed.weight.exp_avg"
    shapes = [list(tensors[moment].shape) for tensors in found.values() if moment in tensors]
    assert shapes == [[4, 5], [3, 5]]
    sizes = {
        rank: sum(content["size"] for name, content in body["files"].items() if rank in name)
        for rank in ("rank-00000", "rank-00001", "rank-00002", "rank-00003")
    }
    assert max(sizes.values()) < 1.3 * min(sizes.values()), "replicas share the work"
    # A slice that is missing, or another rank's, is damage.
    file, other = (path / f"model-rank-0000{rank}.safetensors" for rank in (0, 1))
    for damage in (lambda: shutil.copy(other, file), file.unlink):
        damage()
        with pytest.raises(NoCheckpointError, match=file.stem):
            CheckpointStore(tmp_path).load(set_aside=False)


def test_weights_alone_are_taken_from_slices_and_from_files(ranks, tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    saved = on(ranks, Layout(3, "fsdp"), begun, folder)[0]
    loaded = CheckpointStore(folder).load()
    exported = export(loaded, tmp_path / "exported", {})
    weights = {name: answer for name, answer in saved.items() if name.startswith("model.")}
    for path in (tmp_path / "run", loaded.path, exported):
        for layout in (ALONE, Layout(2, "fsdp")):
            for found in on(ranks, layout, initial, path):
                assert weights.items() <= found.items(), (path, layout)


WHY = {
    "disk": "step-00000001: could not be written: No space left on device",
    "state": "not saved: model.embed.weight not finite",
}


@pytest.mark.parametrize("where", WHY)
def test_what_fails_on_one_rank_is_refused_on_all_and_leaves_nothing(ranks, where, tmp_path):
    shown = ranks.run(3, refused, tmp_path, where)
    assert shown[0] == shown[1] == shown[2]
    assert len(shown[0]) == 2, "directly, and behind the steps"
    for text in shown[0]:
        assert WHY[where] in text
    assert list(tmp_path.iterdir()) == []


def test_ranks_share_the_verification_and_agree_on_damage(ranks, tmp_path):
    on(ranks, ALONE, begun, tmp_path)
    path = CheckpointStore(tmp_path).path(1)
    assert ranks.run(3, read, tmp_path) == [1] * 3
    for name in ("model", "optimizer", "state"):
        file = path / f"{name}.safetensors"
        whole = file.read_bytes()
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        readers = 0
        for rank in range(3):
            try:
                verify(path, rank=rank, num_ranks=3)
            except DamagedError:
                readers += 1
        assert readers == 1, "each file is read by one of the ranks"
        answer = ranks.run(3, read, tmp_path)
        assert answer[0] == answer[1] == answer[2]
        assert f"{name}.safetensors does not match its SHA-256" in answer[0]
        (tmp_path / f"damaged-{path.name}").rename(path)
        file.write_bytes(whole)


def test_saving_and_loading_need_a_shard_and_one_tensor_and_never_the_whole(ranks, tmp_path):
    saved = {"one": ranks.run(1, peaks, tmp_path / "one", "whole")[0]["digest"]}
    for how, source in (("direct", "four"), ("load", "one"), ("behind", "two")):
        for answer in ranks.run(4, peaks, tmp_path / source, how):
            extra = answer["peak"] - answer["shard"]
            copy = answer["shard"] if how == "behind" else 0
            assert extra <= copy + answer["largest"] < answer["whole"] / 2, (how, source)
            assert saved.setdefault(source, answer["digest"]) == answer["digest"]


ROWS = 6


@given(cuts=st.sets(st.integers(1, ROWS - 1)), ends=st.tuples(*[st.integers(0, ROWS)] * 2))
def test_any_rows_are_read_from_any_parts(cuts, ends, tmp_path_factory):
    tensors = {
        "a": torch.arange(ROWS * 2.0).reshape(ROWS, 2),
        "b": torch.arange(ROWS),
        "none": torch.zeros(ROWS, 0),
    }
    bounds = [0, *sorted(cuts), ROWS]
    folder = tmp_path_factory.mktemp("parts")
    paths = [folder / f"{start}.safetensors" for start in bounds[:-1]]
    for path, (start, stop) in zip(paths, pairwise(bounds), strict=True):
        write_tensors(path, {name: tensor[start:stop] for name, tensor in tensors.items()})
    stored = open_tensors(paths)
    start, stop = sorted(ends)
    for name, tensor in tensors.items():
        assert stored[name].shape == tensor.shape
        assert torch.equal(stored[name][...], tensor)
        assert torch.equal(stored[name][start:stop], tensor[start:stop])


@pytest.mark.parametrize(
    "other", [torch.zeros(2, 3), torch.zeros(2, 2).int(), torch.tensor(1.0)], ids=str
)
def test_parts_that_do_not_fit_together_are_damage(other, tmp_path):
    paths = [tmp_path / "1.safetensors", tmp_path / "2.safetensors"]
    for path, tensor in zip(paths, (torch.zeros(2, 2), other), strict=True):
        write_tensors(path, {"a": tensor})
    with pytest.raises(DamagedError, match="do not match"):
        open_tensors(paths)
