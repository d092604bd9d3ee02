"""Which evaluation is the best, and for how long none was better."""

import math

from tests.lib.config_support import checked
from trainer.assemble.step import own_parts
from trainer.training.best_metric import STOP, BestMetric


def follow(values, metric="eval_loss", mode="auto", min_delta=0.0):
    followed = BestMetric.of("stop.metric", metric, mode, min_delta)
    name = metric.removeprefix("eval_")
    return followed, [followed.see(step, {name: value}) for step, value in enumerate(values, 1)]


def test_less_is_better_of_losses_and_more_of_accuracy():
    followed, found = follow([3.0, 2.0, 2.5, math.nan, 1.9])
    assert found == [True, True, False, False, True]
    assert (followed.step, followed.num_since) == (5, 0)
    assert follow([0.1, 0.3, 0.2], "eval_web_accuracy")[1] == [True, True, False]
    assert follow([0.1, 0.3, 0.2], "eval_mine", "min")[1] == [True, False, False]
    assert follow([3.0, 2.9, 2.5], min_delta=0.2)[1] == [True, False, True]
    assert follow([math.nan, 1.0])[1] == [False, True]
    few = follow([3.0, 2.9, 2.9], min_delta=0.2)[0].without_better
    asked = "an improvement of more than stop.min_delta=0.2 over 3.0000 at step 1"
    assert few == f"2 evaluations without {asked}"


def test_a_direction_that_is_typed_holds_for_stopping_alone():
    config = checked({"stop.metric": "eval_mine", "checkpoint.mode": "max"})
    assert own_parts(config)[STOP].mode == "max"


def test_a_resumed_run_knows_the_best_and_counts_an_evaluation_once():
    followed, _ = follow([2.0, 3.0])
    again = BestMetric.of("stop.metric", "eval_loss", "auto")
    again.load(followed.state())
    assert not again.see(2, {"loss": 1.0})
    assert (again.value, again.num_since) == (2.0, 1)
    other = BestMetric.of("stop.metric", "eval_accuracy", "auto")
    other.load(followed.state())
    assert other.value is None
