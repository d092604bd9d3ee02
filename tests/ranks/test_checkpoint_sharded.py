"""State sharded over ranks: each stores and reads its own rows, and any number of ranks goes on."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.lib.nightly import nightly
from tests.lib.ranks_support import Ranks
from tests.lib.ranks_work import RealBytes, start_sharded
from tests.lib.support import VOCABULARY
from tests.reliability.support import parts_of
from trainer.checkpoint.manifest import DamagedError, verify_folder
from trainer.checkpoint.state import assert_finite, capture, restore
from trainer.checkpoint.store import CheckpointStore, CheckpointWriter
from trainer.checkpoint.tensor_files import open_tensors, write_tensors
from trainer.core import durable
from trainer.core.errors import NoCheckpointError, NonFiniteError, SaveError
from trainer.core.world import World
from trainer.models.bind import bind
from trainer.models.gpt import GPT
from trainer.parallel.fsdp import Sharded, make_mesh


class Layout(NamedTuple):
    """How many ranks hold a model, and how."""

    size: int
    mode: str


ALONE = Layout(1, "none")


class Net(nn.Module):
    """Every awkward kind of tensor: uneven, one row, tied, frozen, unused, 0-d, bf16, no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.embed = nn.Linear(5, 7, bias=False)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.row = nn.Parameter(torch.randn(1, 7))
        self.idle = nn.Parameter(torch.randn(3, 2))
        self.frozen = nn.Parameter(torch.randn(6, 7), requires_grad=False)
        self.norm = nn.BatchNorm1d(7)
        self.register_buffer("mark", torch.randn(3).bfloat16())
        self.register_buffer("none", torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        x = self.norm(self.embed(x) * self.row) + self.head(x)
        return x @ self.frozen.t()


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
        {"params": [p for p in trained if p.dim() > 1], "betas": (0.8, 0.9)},
    ]
    return torch.optim.AdamW(groups, lr=0.01, amsgrad=True)


def laid_out(world: World, layout: Layout, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    module = Net()
    module.norm.running_mean.normal_()
    if layout.mode in {"fsdp", "hsdp"}:
        mesh = make_mesh(world, 2 if layout.mode == "hsdp" else 1)
        Sharded(module, bind(module), [*module.blocks], world, mesh)
    return module


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Give every rank the same data, so that the mean over ranks is each one's gradient."""
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        module(torch.randn(4, 5)).square().sum().backward()
        optimizer.step()


def digests(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Spell out the whole state, gathered by PyTorch."""
    tensors, parts = capture(parts_of(module, optimizer))
    answer = {"parts": repr({k: v for k, v in parts.items() if k != "rng"})}
    for name, tensor in tensors.items():
        if not name.startswith("rng."):
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            bits = whole.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            kind = f"{whole.dtype} {list(whole.shape)} "
            answer[name] = kind + hashlib.sha256(bits).hexdigest()
    return answer


def on(ranks: Ranks, layout: Layout, work, *args):
    """What every rank of a layout gave; one rank alone needs no process of its own."""
    if layout.size == 1:
        return [work(World(), layout, *args)]
    return ranks.run(layout.size, work, layout, *args)


def begun(world: World, layout: Layout, folder: Path) -> dict[str, str]:
    """Train a little and save step 1; gives what was saved."""
    module = laid_out(world, layout, seed=0)
    optimizer = adamw(module)
    train(module, optimizer, 2)
    parts = parts_of(module, optimizer)
    CheckpointWriter(CheckpointStore(folder), world).save(1, *capture(parts))
    return digests(module, optimizer)


def passed_on(world: World, layout: Layout, folder: Path, step: int) -> tuple[dict[str, str], bool]:
    """Restore into a model that began otherwise, and save; whether tied weights are tied, too."""
    store = CheckpointStore(folder)
    module = laid_out(world, layout, seed=step + 5)
    optimizer = adamw(module)
    parts = parts_of(module, optimizer)
    restore(store.load(step, world=world), parts)
    found = digests(module, optimizer)
    writer = CheckpointWriter(store, world, asynchronous=True)
    writer.save(step + 1, *capture(parts))
    train(module, optimizer, 1)
    assert writer.close() == store.path(step + 1)
    return found, module.head.weight is module.embed.weight


@pytest.mark.parametrize(
    "layouts",
    [
        [Layout(4, "hsdp"), Layout(3, "fsdp"), ALONE],
        nightly([Layout(2, "fsdp"), ALONE, Layout(4, "hsdp"), Layout(3, "fsdp"), Layout(2, "ddp")]),
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
    files = json.loads((path / "manifest.json").read_bytes())["files"]
    assert "model.mark" in load_file(path / "model.safetensors")
    found = {file.name: load_file(file) for file in sorted(path.glob("*-rank-*.safetensors"))}
    moment = "optimizer.state.embed.weight.exp_avg"
    shapes = [list(tensors[moment].shape) for tensors in found.values() if moment in tensors]
    assert shapes == [[4, 5], [3, 5]]
    sizes = [sum(files[n]["size"] for n in files if f"rank-0000{rank}" in n) for rank in range(4)]
    assert max(sizes) < 1.3 * min(sizes), "replicas share the work"
    # A slice that is missing, or another rank's, is damage.
    file, other = (path / f"model-rank-0000{rank}.safetensors" for rank in (0, 1))
    for damage in (lambda: shutil.copy(other, file), file.unlink):
        damage()
        with pytest.raises(NoCheckpointError, match=file.stem):
            CheckpointStore(tmp_path).load(set_aside=False)


def refused(world: World, folder: Path, where: str) -> list[str]:
    """Save where one rank's disk refuses or its state is not finite; gives what each call said."""

    class Full(durable.FileSystem):
        def create(self, path: Path) -> int:
            if "rank" in path.name:
                raise OSError(28, "No space left on device")
            return super().create(path)

    module = laid_out(world, Layout(world.size, "fsdp"), seed=0)
    optimizer = adamw(module)
    train(module, optimizer, 1)
    if where == "state" and world.rank == 1:
        module.embed.weight.to_local().data[0, 0] = float("nan")
    disk = Full() if (where, world.rank) == ("disk", 1) else durable.FileSystem()
    shown = []
    for is_behind in (False, True):
        writer = CheckpointWriter(CheckpointStore(folder), world, asynchronous=is_behind)
        tensors, parts = capture(parts_of(module, optimizer))
        try:
            with durable.use(disk):
                world.on_all(lambda tensors=tensors: assert_finite(tensors))
                writer.save(1, tensors, parts)
                writer.close()
        except (SaveError, NonFiniteError) as error:
            shown.append(str(error))
    return shown


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


def read(world: World, folder: Path) -> int | str:
    """Load the newest intact checkpoint: its step, or why not."""
    try:
        return CheckpointStore(folder).load(world=world).step
    except NoCheckpointError as error:
        return str(error)


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
                verify_folder(path, rank=rank, num_ranks=3)
            except DamagedError:
                readers += 1
        assert readers == 1, "each file is read by one of the ranks"
        answer = ranks.run(3, read, tmp_path)
        assert answer[0] == answer[1] == answer[2]
        assert f"{name}.safetensors does not match its SHA-256" in answer[0]
        (tmp_path / f"damaged-{path.name}").rename(path)
        file.write_bytes(whole)


def gpt() -> nn.Module:
    return GPT(VOCABULARY, width=64, num_layers=4, num_heads=4, max_length=32)


def peaks(world: World, folder: Path, how: str) -> dict[str, Any]:
    """The most tensor bytes beyond the shards while saving or loading; the shard and all bytes."""
    module = gpt() if how == "whole" else start_sharded(gpt, world)[0]
    parameters, store = [*module.parameters()], CheckpointStore(folder)
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    if how != "load":  # moments of every parameter, without the memory of a step
        for p in parameters:
            optimizer.state[p] = {"step": torch.tensor(1.0)}
            optimizer.state[p] |= {"exp_avg": p.detach() * 2, "exp_avg_sq": p.detach() * 3}
    writer = CheckpointWriter(store, world, asynchronous=how == "behind")
    with RealBytes() as counted:
        counted.peak.assign("parameters", parameters)
        owned = [t for state in optimizer.state.values() for t in state.values()]
        counted.peak.assign("optimizer_state", owned)
        if how == "load":
            restore(store.load(world=world), parts_of(module, optimizer))
        else:
            writer.save(1, *capture(parts_of(module, optimizer)))
    writer.close()
    own = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
    return {
        "peak": counted.peak.estimate.peak_bytes,
        "shard": 3 * sum(p.nbytes for p in own),
        "whole": 3 * sum(p.nbytes for p in parameters),
        "largest": max(p.nbytes for p in parameters),
        "digest": digests(module, optimizer),
    }


@pytest.mark.slow
def test_saving_and_loading_need_a_shard_and_one_tensor_and_never_the_whole(ranks, tmp_path):
    saved = {"one": ranks.run(1, peaks, tmp_path / "one", "whole")[0]["digest"]}
    for how, source in (("direct", "three"), ("load", "one"), ("behind", "two")):
        for answer in ranks.run(3, peaks, tmp_path / source, how):
            extra = answer["peak"] - answer["shard"]
            copy = answer["shard"] if how == "behind" else 0
            assert extra <= copy + answer["largest"] < answer["whole"] / 2, (how, source)
            assert saved.setdefault(source, answer["digest"]) == answer["digest"]


@pytest.mark.parametrize(
    "other", [torch.zeros(2, 3), torch.zeros(2, 2).int(), torch.tensor(1.0)], ids=str
)
def test_parts_that_do_not_fit_together_are_damage(other, tmp_path):
    paths = [tmp_path / "1.safetensors", tmp_path / "2.safetensors"]
    for path, tensor in zip(paths, (torch.zeros(2, 2), other), strict=True):
        write_tensors(path, {"a": tensor})
    with pytest.raises(DamagedError, match="do not match"):
        open_tensors(paths)
