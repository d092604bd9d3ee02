"""What an objective or a gradient strategy of one's own gives: taken, or refused in one line."""

import pytest
import torch

from tests.lib.nightly import nightly, slow
from tests.lib.objective_toys import Count, Marked, Numbers, Odd, Partly, Sometimes
from tests.lib.run_support import curve, entries, go
from tests.lib.run_toys import Net, Rows
from tests.lib.support import EXACT, Bench, relative_error
from trainer.core.errors import ConfigError
from trainer.core.micro_batch import Fields
from trainer.data.loader import Loader, Request
from trainer.models.bind import bind
from trainer.objectives.base import sums_of, weights_of
from trainer.objectives.classify import Classify
from trainer.objectives.next_token import NextToken
from trainer.plan.cut import Layout
from trainer.plan.cuts import Fixed
from trainer.plan.lengths import Lengths
from trainer.training.data import HeldOut
from trainer.training.evaluation import evaluate_parts

OWN = "tests.lib.objective_toys"


def bench(cut: Fixed, **settings: object) -> Bench:
    return Bench(cut, **{"dataset": Rows(), "model": Net, **settings})


def fields_of(data: Rows) -> Fields:
    """A micro-batch of three samples."""
    return Loader(data, num_workers=0, seed=0).load(Request((0, 1, 2), 0, 12))


@pytest.mark.parametrize(
    ("sums", "weights"), [*((s, "") for s in Odd.SUMS), *(("", w) for w in Odd.WEIGHTS)]
)
def test_what_is_none_names_class_method_and_what_came(sums, weights):
    def weigh_and_sum(objective: Odd, fields: Fields) -> None:
        found = weights_of(objective, fields)
        sums_of(objective, bind(Net()), fields, found)
        with torch.no_grad():  # where nothing may be left out
            sums_of(objective, bind(Net()), fields, found)

    with pytest.raises(ConfigError) as caught:
        weigh_and_sum(Odd(sums, weights), fields_of(Rows()))
    (error,) = str(caught.value).splitlines()
    assert error.startswith("objective: ")
    assert "of Odd" in error
    assert ("sums" if sums else "weights") in error


@pytest.mark.parametrize(("method", "longest"), [("weights", 2), ("sums", 8)])
def test_a_term_left_out_of_some_micro_batches_is_refused(method, longest):
    found = bench(Fixed(micro=1), objective=Sometimes(method, longest))
    with pytest.raises(ConfigError, match=f"{method}` of Sometimes.*second"):
        [found.step() for _ in range(6)]


@pytest.mark.parametrize("otherwise", ["constant", "left out"])
def test_a_micro_batch_without_a_loss_term_may_give_a_constant_or_leave_it_out(otherwise):
    (found, loss), (expected, whole) = (
        bench(cut, objective=Partly(otherwise)).gradient_and_loss()
        for cut in (Fixed(micro=1), Fixed(steps=1))
    )
    assert relative_error(found, expected) <= 10 * EXACT[torch.float32]
    assert loss == pytest.approx(whole, rel=EXACT[torch.float32])


def test_a_weight_or_a_metric_may_be_any_number():
    found = []
    for kind in Numbers.KINDS:
        own = bench(Fixed(micro=3), objective=Numbers(kind))
        report, lengths = own.step(), Lengths.of(own.dataset.lengths)
        samples = HeldOut(loader=own.loader, lengths=lengths, layout=Layout(), max_tokens=40)
        metrics = evaluate_parts(own.context, {"": samples})[""]
        found.append([float(report.loss), float(report.metrics["share"]), metrics])
    assert found == [found[0]] * len(Numbers.KINDS)


@pytest.mark.parametrize("dtype", ["bool", "float16", "uint8", "int16"])
def test_padding_of_labels_of_any_type_is_no_loss_term(dtype):
    report = bench(Fixed(steps=1), objective=Count(), dataset=Marked("tokens", dtype)).step()
    (batch,) = report.batch.micro_batches
    assert report.loss == batch.num_tokens < batch.num_positions


@pytest.mark.parametrize(("objective", "data"), [(NextToken(), "tokens"), (Classify(), "row")])
def test_real_numbers_are_no_classes_and_no_tokens(objective, data):
    with pytest.raises(ConfigError, match=r"labels are torch\.float32"):
        weights_of(objective, fields_of(Marked(data, "float32")))


@pytest.mark.parametrize(
    ("line", "causal"),
    [("model.shifts=false", "false"), ("model.shifts=true", "true"), ("model.is_odd=true", None)],
)
def test_a_head_that_gives_a_mean_where_a_sum_is_asked_for_is_refused_with_what_to_type(
    line, causal
):
    line = f"model._target_={OWN}.MeanHead objective=model_loss {line} steps=2"
    remedy = "type objective.reduction=mean if it ignores num_items_in_batch, and obj"
    fault = rf"^objective: the loss of MeanHead is not a sum over samples \(.*{remedy}"
    with pytest.raises(ConfigError, match=fault):
        go(line)
    if causal is None:
        return
    line += f" objective.reduction=mean objective.causal={causal}"
    cut, whole = (go(f"{line} accum.micro={micro}") for micro in (1, 8))
    assert curve(cut, "loss") == pytest.approx(curve(whole, "loss"), rel=1e-6)


@pytest.mark.parametrize("on_bad", ["stop", "skip"])
def test_a_collate_may_add_tokens_that_lengths_count(on_bad):
    run = go(f"steps=1 data._target_={OWN}.Begun objective=next_token data.on_bad={on_bad}")
    assert curve(run, "padding")[0] > 0


@pytest.mark.parametrize("layout", ["accum.micro=2", nightly("parallel.ranks=2")])
def test_a_metric_given_while_training_is_on_every_step_s_record_and_line(layout, capfd):
    line = f"steps=3 objective._target_={OWN}.Numbers"
    whole = curve(go(f"{line} accum.micro=8"), "share")
    capfd.readouterr()
    run = go(f"{line} {layout}")
    assert all(0 < share < 1 for share in whole)
    assert curve(run, "share") == pytest.approx(whole, rel=1e-12), "it does not depend on the cut"
    assert "eval_share" in entries(run)[-1]
    shown = capfd.readouterr().out
    assert all(f"share {share:.4f}" in shown for share in whole), shown


@pytest.mark.parametrize("line", ["eval.every=1", slow("command=verify")])
def test_a_head_of_transformers_that_gives_no_words_is_trained_planned_and_verified(line):
    model = "model._target_=tests.lib.heads.classifier data._target_=tests.lib.heads.classified"
    run = go(f"steps=1 objective=model_loss objective.reduction=mean {model} {line}")
    assert run.exit_code == 0
