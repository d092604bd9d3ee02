"""Hugging Face heads that compute their own loss: who honours the item count, and who drops it.

transformers issue 47688 lists heads that divide by a count of their own, whatever the trainer
passes as `num_items_in_batch`.
"""

from typing import Any

import pytest
import torch

from tests.lib.heads import Examples, Head
from tests.lib.nightly import nightly
from tests.lib.support import EXACT, WRONG, Bench
from trainer.features.heads.seq2seq import Seq2Seq
from trainer.plan.cuts import Budget, Fixed
from trainer.verify.report import VerifyReport

pytestmark = pytest.mark.filterwarnings("ignore")

DROPPING = [
    Head("BertForTokenClassification", "BertConfig", "tags"),
    Head("BertForMaskedLM", "BertConfig", "masked"),
    Head("LlamaForSequenceClassification", "LlamaConfig", "class"),
    Head("BertForMultipleChoice", "BertConfig", "choice"),
    Head("BertForQuestionAnswering", "BertConfig", "span", {"num_labels": 2}),
    Head("BartForConditionalGeneration", "BartConfig", "tagged words"),
    # Its mean runs over every position with a mask, labelled or not: no count of labels is right.
    Head("ElectraForPreTraining", "ElectraConfig", "binary", mean_is_exact=False),
]


def checked(head: Head, objective: Any, cut: Any = None) -> VerifyReport:
    return Bench(
        cut or Budget(max_tokens=45),
        torch.float32,
        global_batch=12,
        dataset=Examples(head.data),
        model=head.build,
        objective=objective,
    ).verified()


@pytest.mark.parametrize("reduction", ["sum", nightly("mean")])
def test_a_head_that_honours_the_item_count_is_exact_as_a_sum_and_as_a_weighted_mean(reduction):
    head = Head("GPT2LMHeadModel", "GPT2Config", "causal")
    report = checked(head, head.objective(reduction))
    assert (report.verdict, report.dtype) == ("exact", "float64"), report.culprits
    assert report.max_relative_error <= EXACT[torch.float64]


@pytest.mark.parametrize(
    ("head", "cut"),
    [(DROPPING[0], Fixed(steps=1)), *(nightly(head, None) for head in DROPPING)],
)
def test_a_head_that_drops_the_item_count_is_named_and_its_mean_over_the_right_count_is_exact(
    head, cut
):
    report = checked(head, head.objective("sum"), cut)
    assert report.max_relative_error > WRONG
    [(name, reason)] = report.culprits
    assert name == "objective ModelLoss"
    assert "set objective.reduction=mean if it ignores num_items_in_batch" in reason
    report = checked(head, head.objective("mean"))
    assert report.exact == head.mean_is_exact, report.culprits
    if head.mean_is_exact:
        assert report.max_relative_error <= EXACT[torch.float64]
    else:
        assert [name for name, _ in report.culprits] == ["objective ModelLoss"]


def test_the_balance_of_a_router_within_the_loss_is_named_with_the_setting_that_ends_it():
    values = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
    head = Head("MixtralForCausalLM", "MixtralConfig", "causal", values)
    report = checked(head, head.objective("sum"))
    assert report.verdict == "not_exact"
    [(name, reason)] = report.culprits
    assert (name, "output_router_logits=False" in reason) == ("objective ModelLoss", True)


def test_an_encoder_decoder_is_exact_whose_inputs_the_objective_makes_by_the_model():
    head = Head("T5ForConditionalGeneration", "T5Config", "tagged words")
    report = checked(head, Seq2Seq())
    assert (report.verdict, report.dtype) == ("exact", "float64"), report.culprits
