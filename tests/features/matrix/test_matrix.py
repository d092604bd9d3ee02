"""The table of `train verify matrix=true`, and what is named where an execution is another step."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.lib.nightly import slow
from tests.lib.run_support import only_run, overrides, read_json
from tests.lib.support import VOCABULARY, Bench, TinyLM
from trainer.cli.main import run as run_line
from trainer.commands.verify_sync import verify_sync
from trainer.config.run_config import from_text, to_text
from trainer.core.declared_state import EarlierState
from trainer.core.world import World
from trainer.features.matrix.axes import compare_axes
from trainer.features.matrix.compared import Reference, relative_distance
from trainer.features.matrix.matrix import AxisFound
from trainer.features.matrix.rounding import ROUNDOFF, bound_of_rounding, rounded
from trainer.parallel.base import Replicated
from trainer.plan.cuts import Fixed
from trainer.verify.case import Case, copied
from trainer.verify.reduced import ReducedError, compare_reduced

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler

AXES = ["cut", "ranks", "packing", "recomputation", "kernel", "compile", "precision"]
GPT = (
    "matrix=true model=gpt_tiny model.width=12 model.num_layers=1 model.num_heads=2 "
    "model.vocab_size=16 model.max_length=12"
)
WIDTH = 8


class Mixer(nn.Module):
    """Averages over what is before, with faults: each is another execution's alone."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault, self.linear = fault, nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1  # first: what is recomputed ends with the last tensor that is saved
        past = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        attended = F.scaled_dot_product_attention(*[x[:, None]] * 3, is_causal=True)[:, 0]
        if self.fault == "kernel" and not torch.backends.cuda.flash_sdp_enabled():
            attended = 1.001 * attended
        x = x + torch.tanh(self.linear(past if self.fault == "packing" else attended))
        if self.fault == "precision":
            x = (x + 1e5) - 1e5
        return x


class Mixing(nn.Module):
    """Takes boundaries of documents, and heeds them unless that is its fault."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList([Mixer(fault)])
        self.heeds = fault != "packing"

    def forward(self, input_ids: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        rows = [input_ids]
        if cu_seqlens is not None and self.heeds:
            rows = torch.split(input_ids, cu_seqlens.diff().tolist(), dim=1)
        return torch.cat([self.head(self.blocks[0](self.embed(row))) for row in rows], dim=1)


def matrix_of(bench: Bench) -> dict[str, AxisFound]:
    report = bench.verified()
    found = compare_axes(bench.context, bench.feed.next(), bench.feed, report, Path())
    assert list(found) == AXES
    return found


@pytest.fixture
def no_compiler():
    import torch._inductor.config as inductor  # noqa: PLC0415 - a second

    with inductor.patch({"cpp.cxx": ("no_such_compiler",)}):
        yield


def compare_ranks(world: World, config: str, folder: Path) -> int:
    return verify_sync(from_text(config), folder, world, lambda: False)


# Of what it compiles
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize("dropout", [0.1, slow(0)])
def test_each_way_of_execution_has_a_verdict_in_the_file_and_a_row_on_the_screen(
    dropout, capsys, ranks, monkeypatch
):
    if dropout:  # real ranks too, which need not import all of it again
        monkeypatch.setattr(
            "trainer.launch.start.supervise",
            lambda config, folder, *_: ranks.run(2, compare_ranks, to_text(config), folder),
        )
    assert run_line(["verify", *overrides(f"{GPT} model.dropout={dropout}")]) == 0
    matrix = read_json(only_run() / "verify.json")["matrix"]
    assert list(matrix) == AXES
    verdicts = {name: axis.pop("verdict") for name, axis in matrix.items()}
    compiled = "not_there" if dropout else "exact"
    assert verdicts == {
        **dict.fromkeys(AXES, "exact"), "compile": compiled, "precision": "to_rounding"
    }  # fmt: skip
    for name, axis in matrix.items():
        assert axis["module"] is None
        assert verdicts[name] == "not_there" or axis["measured"] <= axis["bound"]
        assert axis["dtype"] == (
            None if verdicts[name] == "not_there" else "fp32" if name == "precision" else "float64"
        )
    screen = capsys.readouterr().out
    for name, word in verdicts.items():
        assert f"  {name:<15} {word.replace('_', ' ')}" in screen


@pytest.mark.parametrize("fault", ["packing", "recomputation", "kernel", "precision"])
def test_a_planted_fault_is_named_with_its_module_and_under_its_own_axis_alone(
    fault, no_compiler, monkeypatch
):
    bench = Bench(Fixed(micro=3), model=lambda: Mixing(fault))
    if fault == "recomputation":  # then backward moves the buffer once more
        monkeypatch.setattr(EarlierState, "lent", lambda _: nullcontext())
    if fault == "precision":
        bench = Bench(Fixed(micro=3), torch.float32, model=lambda: Mixing(fault))
    found = matrix_of(bench)
    wrong = {name for name, axis in found.items() if axis.verdict == "not_exact"}
    assert wrong == {fault}
    axis = found[fault]
    assert axis.module.startswith("blocks.0")
    assert axis.reason
    assert axis.measured > axis.bound
    assert found["ranks"].verdict == found["compile"].verdict == "not_there"


def test_what_a_model_lacks_is_not_there_with_its_reason(no_compiler):
    found = matrix_of(Bench(Fixed(micro=3)))
    for name, text in [
        ("ranks", "a launcher"),
        ("packing", "takes no cu_seqlens"),
        ("recomputation", "no list of blocks"),
        ("kernel", "no attention"),
        ("compile", "compiler"),
    ]:
        assert found[name].verdict == "not_there"
        assert text in found[name].reason


def normed(world: World, kind: type[nn.Module]) -> ReducedError | None:
    bench = Bench(Fixed(micro=2), model=lambda: TinyLM(norm=kind(WIDTH)))

    def lay_out(module, call):
        return Replicated(module, call, [*module.parameters()], world)

    how = (bench.context, bench.feed.next(), bench.feed, lay_out, world)
    return compare_reduced(*how, in_one_piece=True)


def test_a_batch_norm_differs_over_ranks_and_is_named(ranks):
    for kind in (nn.BatchNorm1d, nn.LayerNorm):
        for found in ranks.run(2, normed, kind):
            assert found.is_exact == (kind is nn.LayerNorm)
            assert [name for name, _ in found.culprits] == ["norm"] * (not found.is_exact)


def test_a_bound_follows_from_what_the_gradient_makes_of_values_that_are_rounded():
    values = torch.randn(999).double()
    for word, dtype in {"bf16": torch.bfloat16, "fp16": torch.float16}.items():
        assert torch.equal(rounded(values, ROUNDOFF[word]), values.to(dtype).double())
    bench = Bench(Fixed(micro=3))
    case = Case(
        context=bench.context, dtype=torch.float64, batch=bench.feed.next(), feed=bench.feed
    )
    own = Reference.of(case)
    single, half, brain = (bound_of_rounding(own, word) for word in ("fp32", "fp16", "bf16"))
    assert 2**-24 < single < 2**-16
    assert 2**-11 < half < brain < 0.5


@pytest.mark.slow
def test_a_gradient_in_fp16_is_scaled_by_less_where_it_would_be_infinite():
    bench = Bench(Fixed(micro=3), torch.float32)
    with torch.no_grad():
        bench.context.model.module.head.weight *= 40
    context, batch = copied(bench.context, torch.float64), bench.feed.next()
    case = Case(context=context, dtype=torch.float64, batch=batch, feed=bench.feed)
    half = replace(case, context=copied(bench.context, None), dtype=None, precision="fp16")
    assert relative_distance(half.gradient(), case.gradient()) < 0.01
