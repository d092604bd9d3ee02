"""Tuning, `verify` and replays leave Hugging Face models as one plain forward does.

The first forward of a transformers model that gives its hidden states registers hooks that capture
them, and notes in a flag that it did.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tests.lib import heads
from tests.lib.heads import BERT, BUILT, ENCODER, Examples, Head
from tests.lib.nightly import nightly
from tests.lib.run_support import curve, go, overrides
from tests.lib.support import Bench, Failing
from trainer.cli.main import run as run_line
from trainer.data.loader import Request
from trainer.plan.cuts import Fixed
from trainer.plan.memory import Shape
from trainer.training.step import train_step
from trainer.tune.predict import Predictor
from trainer.tune.speed import rehearsal
from trainer.tune.workload import Tiled, Workload
from trainer.verify.proof import verify

pytestmark = pytest.mark.filterwarnings("ignore")

ONE = Head("T5ForConditionalGeneration", "T5Config", heads.T5, "tagged words")
"""Hidden states of two kinds; BERT is shown by the run below."""
OTHERS = [
    BERT,
    Head("GPT2LMHeadModel", "GPT2Config", heads.GPT2 | {"n_layer": 2}, "causal"),
    Head("MixtralForCausalLM", "MixtralConfig", heads.MIXTRAL, "causal"),
    Head("AlbertForMaskedLM", "AlbertConfig", heads.ALBERT, "masked"),
    Head("DistilBertForTokenClassification", "DistilBertConfig", heads.DISTIL, "tags"),
    Head("RobertaForTokenClassification", "RobertaConfig", ENCODER | {"pad_token_id": 0}, "tags"),
    Head("ElectraForQuestionAnswering", "ElectraConfig", ENCODER | {"num_labels": 2}, "span"),
    Head("LlamaForCausalLM", "LlamaConfig", heads.DECODER, "causal"),
    Head("BartForConditionalGeneration", "BartConfig", heads.BART, "tagged words"),
]


def bench_of(head: Head) -> Bench:
    return Bench(
        Fixed(micro=4),
        torch.float32,
        global_batch=8,
        dataset=Examples(head.data),
        model=head.build,
        objective=head.objective("sum" if head.data == "causal" else "mean"),
    )


def num_hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def seen_of(model: nn.Module, fields: Mapping[str, Tensor]) -> tuple[int, list[int], Tensor]:
    """Count the hooks and the hidden states of each kind, and give the logits."""
    model = copy.deepcopy(model).eval()
    with torch.no_grad():
        output = model(**fields, output_hidden_states=True)
    hidden = [len(value) for name, value in output.items() if name.endswith("hidden_states")]
    return num_hooks(model), hidden, output.get("logits", output.get("start_logits"))


def assert_as_after_one_forward(head: Head, model: nn.Module, fields: Mapping[str, Tensor]) -> None:
    fresh = head.build()
    fresh.load_state_dict(model.state_dict())
    fresh.eval()(**fields)
    (hooks, hidden, logits), expected = seen_of(model, fields), seen_of(fresh, fields)
    assert (hooks, hidden) == expected[:2]
    assert torch.equal(logits, expected[2])


@pytest.mark.parametrize("head", [ONE, *map(nightly, OTHERS)], ids=lambda head: head.name)
def test_a_model_of_transformers_is_left_as_after_one_forward(head):
    head = replace(head, values={**head.values, "output_hidden_states": True})
    bench, strategy = bench_of(head), Failing(1, "forward")
    length = int(bench.dataset.lengths[:2].max())
    fields = bench.loader.load(Request((0, 1), 0, length))
    work = Workload(
        model=bench.module,
        objective=bench.objective,
        make_optimizer=lambda model: torch.optim.SGD(model.parameters()),
        make_fields=Tiled(fields, length),
    )
    Predictor(work, Shape(2, length))(Shape(2, length))
    with rehearsal(work, recompute=False) as prepare:
        prepare(Shape(2, length))()
    assert_as_after_one_forward(head, bench.module, fields)
    report = verify(bench.kit, bench.feed.next(), bench.feed, whole_fits=True)
    assert report.exact
    assert_as_after_one_forward(head, bench.module, fields)
    assert (
        train_step(replace(bench.kit, strategy=strategy), bench.feed.next(), bench.feed).replays
        == 1
    )
    assert_as_after_one_forward(head, bench.module, fields)


@pytest.mark.usefixtures("own_folder")
def test_tuning_a_replayed_step_and_verify_of_a_run_leave_it_so_too():
    line = (
        "model._target_=tests.lib.heads.bert data._target_=tests.lib.heads.masked "
        "objective=model_loss objective.reduction=mean objective.causal=false "
        "batch.global=8 accum=auto steps=1"
    )
    fields = {"input_ids": torch.arange(12).view(2, 6)}
    failing = "accum.gradient._target_=tests.lib.support.Failing +accum.gradient.at=0"
    run = go(f"{line} {failing} +accum.gradient.phase=forward")
    assert curve(run, "replays") == [1]
    assert_as_after_one_forward(BERT, BUILT[-1], fields)
    assert run_line(["verify", *overrides(line)]) == 0
    assert_as_after_one_forward(BERT, BUILT[-1], fields)
