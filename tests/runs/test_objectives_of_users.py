"""What an objective or a gradient strategy of one's own gives: taken, or refused in one line."""

from __future__ import annotations

import pytest

from tests.lib.nightly import nightly
from tests.lib.objective_toys import Numbers, Odd
from tests.lib.run_support import TOYS, curve, entries, go, read_json
from trainer.core.errors import ConfigError

OWN = "tests.lib.objective_toys"
ROUNDING = 1e-6

pytestmark = pytest.mark.usefixtures("own_folder")


def refusal(line: str) -> str:
    """What a run is refused with, on one line."""
    with pytest.raises(ConfigError) as caught:
        go(f"steps=2 {line}")
    (line,) = str(caught.value).splitlines()
    return line


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        *(("sums", f"'objective.sums={given}'") for given in Odd.SUMS),
        *(("weights", f"'objective.weights={given}'") for given in Odd.WEIGHTS),
        ("sums", "objective.sums=none accum=auto"),
        nightly("sums", "objective.sums=detached accum=auto"),
    ],
)
def test_what_is_none_names_class_method_and_what_came(kind, line):
    error = refusal(f"objective._target_={OWN}.Odd {line}")
    assert error.startswith("objective: ")
    assert "of Odd" in error
    assert kind in error


@pytest.mark.parametrize(
    ("method", "longest"), [("weights", 2), ("sums", 8), nightly("weights", 8), nightly("sums", 2)]
)
def test_a_term_left_out_of_some_micro_batches_is_refused(method, longest):
    line = f"objective._target_={OWN}.Sometimes objective.method={method} accum.micro=1"
    error = refusal(f"{line} objective.longest={longest} steps=6")
    assert f"{method} of Sometimes" in error
    assert "second" in error


@pytest.mark.parametrize("otherwise", ["constant", "left out"])
def test_a_micro_batch_without_a_loss_term_may_give_a_constant_or_leave_it_out(otherwise):
    line = f"steps=2 objective._target_={OWN}.Partly 'objective.otherwise={otherwise}'"
    cut, whole = (go(f"{line} accum.micro={micro}") for micro in (1, 8))
    assert curve(cut, "loss") == pytest.approx(curve(whole, "loss"), rel=ROUNDING)
    assert go(f"command=verify {line} accum.micro=1").result["verdict"] == "exact"


def test_weights_in_float32_of_the_data_s_own_are_exact():
    line = f"objective._target_={OWN}.Weighted data._target_={OWN}.Shares accum.micro=1"
    assert go(f"command=verify {line}").result["verdict"] == "exact"


def test_a_weight_or_a_metric_may_be_any_number():
    found = []
    for kind in Numbers.KINDS:
        run = go(f"steps=2 objective._target_={OWN}.Numbers 'objective.kind={kind}'")
        (evaluated,) = [entry for entry in entries(run) if "eval_loss" in entry]
        result = read_json(run.folder / "result.json")
        figures = [evaluated["eval_loss"], evaluated["eval_share"], result["loss"]]
        found.append([*curve(run, "loss"), *figures, result["eval_loss"]])
    assert found == [found[0]] * len(Numbers.KINDS)


def test_a_strategy_may_compute_its_loss_without_the_objective():
    run = go(f"steps=3 accum.gradient._target_={OWN}.OwnLoss")
    assert run.result["skipped_steps"] == 0
    assert min(curve(run, "grad_norm")) > 0


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("accum.gradient.goes_back=false", "left no gradient"),
        ("accum.gradient.returns=none", "returned a NoneType"),
        ("accum.gradient.returns=vector", "returned a Tensor"),
    ],
)
def test_a_strategy_that_does_not_do_its_part_is_refused_by_name(line, words):
    error = refusal(f"accum.gradient._target_={OWN}.OwnLoss {line}")
    assert error.startswith("accum.gradient: backward of OwnLoss")
    assert words in error


@pytest.mark.parametrize(
    "dtype", ["bool", "float16", *map(nightly, ("uint8", "int16", "float32", "int64"))]
)
def test_padding_of_labels_of_any_type_is_no_loss_term(dtype):
    line = f"objective._target_={OWN}.Count data._target_={OWN}.Labelled data.dtype={dtype}"
    run = go(f"steps=1 {line} accum.micro=8")
    (shape,) = read_json(run.folder / "plan.json")["shapes"]
    (step,) = [entry for entry in entries(run) if "lr" in entry]
    assert step["loss"] == step["tokens"] < shape["num_samples"] * shape["length"]


@pytest.mark.parametrize("objective", ["next_token", "classify"])
def test_real_numbers_are_no_classes_and_no_tokens(objective):
    data = "Labelled" if objective == "next_token" else "Scored"
    error = refusal(f"objective={objective} data._target_={OWN}.{data} data.dtype=float32")
    assert "labels are torch.float32" in error


@pytest.mark.parametrize(
    ("line", "typed"),
    [
        ("model.shifts=false", "type objective.reduction=mean objective.causal=false,"),
        ("model.shifts=true", "type objective.reduction=mean,"),
        (f"model.by_row=true data._target_={OWN}.Scored", "type objective.reduction=mean,"),
        (f"model._target_={OWN}.SumHead", "take an objective that sums"),
    ],
)
def test_a_head_that_gives_a_mean_where_a_sum_is_asked_for_is_refused_with_what_to_type(
    line, typed
):
    line = f"model._target_={OWN}.MeanHead objective=model_loss {line}"
    error = refusal(line)
    assert error.startswith("objective.reduction=sum: ")
    assert typed in error
    if "type" not in typed:
        return
    keys = typed.removeprefix("type ").rstrip(",")
    cut, whole = (go(f"steps=2 {line} {keys} accum.micro={micro}") for micro in (1, 8))
    assert curve(cut, "loss") == pytest.approx(curve(whole, "loss"), rel=ROUNDING)


def test_a_head_that_heeds_the_count_is_taken():
    line = f"steps=2 model._target_={TOYS}.LossNet objective=model_loss"
    cut, whole = (go(f"{line} accum.micro={micro}") for micro in (1, 8))
    assert curve(cut, "loss") == pytest.approx(curve(whole, "loss"), rel=ROUNDING)


def test_a_head_whose_loss_changes_with_padding_is_a_warning():
    head = f"model._target_={OWN}.SpanHead data._target_={OWN}.Spans objective=model_loss"
    assert "type objective.reduction=mean," in refusal(head)
    run = go(f"command=plan {head} objective.reduction=mean")
    (said,) = read_json(run.folder / "plan.json")["warnings"]
    assert "padding changes it" in said


def test_real_labels_are_not_shifted():
    line = f"model._target_={OWN}.ScoreHead data._target_={OWN}.Column objective=model_loss"
    run = go(f"steps=1 {line} objective.reduction=mean")
    assert run.result["skipped_steps"] == 0


@pytest.mark.parametrize("on_bad", ["stop", "skip"])
def test_a_collate_may_add_tokens_that_lengths_count(on_bad):
    run = go(f"steps=1 data._target_={OWN}.Begun objective=next_token data.on_bad={on_bad}")
    (step,) = [entry for entry in entries(run) if "lr" in entry]
    assert step["padding"] > 0


@pytest.mark.parametrize("layout", ["accum.micro=2", nightly("parallel.ranks=2")])
def test_a_metric_given_while_training_is_on_every_step_s_record_and_line(layout, capfd):
    line = f"steps=3 objective._target_={OWN}.Numbers"
    whole = curve(go(f"{line} accum.micro=8"), "share")
    capfd.readouterr()
    run = go(f"{line} {layout}")
    assert all(0 < share < 1 for share in whole)
    assert curve(run, "share") == pytest.approx(whole, rel=1e-12), "it does not depend on the cut"
    shown = capfd.readouterr().out
    assert all(f"share {share:.4f}" in shown for share in whole), shown
