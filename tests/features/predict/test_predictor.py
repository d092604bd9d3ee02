"""What `train predict` writes of each record, whatever became of it."""

from typing import Any

import pytest
import torch

from tests.lib.predict_toys import Asked, Documents, Sums, Tokens, predictor_of
from trainer.core.errors import ConfigError, DataError
from trainer.features.predict import predictor
from trainer.objectives.base import Objective
from trainer.objectives.base import Sums as LossSums


def test_each_record_has_its_line_in_order_and_no_sample_is_padded():
    module = Sums()
    lines = [*predictor_of(module=module).lines()]
    assert [line["id"] for line in lines] == [*range(7)]
    words = ["odd", "odd", "even", "odd", "even", None, "even"]
    assert [line["prediction"] for line in lines] == words
    why = lines[5].pop("error")
    assert why.startswith("ValueError: seven (predict_toys.py:")
    assert lines[5] == {"id": 5, "source": "row 5", "prediction": None}
    odd = float(torch.tensor([3.0, 0.0]).double().softmax(0)[0])
    assert lines[1]["probabilities"] == pytest.approx({"odd": odd, "even": 1 - odd}, rel=1e-6)
    assert lines[1]["probability"] == pytest.approx(odd, rel=1e-6)
    # Of one length up to four tokens share a forward.
    assert sorted(module.seen) == [(1, 3), (2, 2), (3, 1)]


class Mean(Objective):
    """Predicts nothing: its loss is the mean of the tokens."""

    def weights(self, fields):
        return {"mean": float(fields["input_ids"].numel())}

    def sums(self, model, fields):
        return LossSums(losses={"mean": fields["input_ids"].double().sum()})


class BadFirst(Tokens):
    rows = ([3, 4], [2, 5], [3, 2], [2, 1, 1, 1])


def test_records_that_cannot_be_read_may_come_before_all_that_can(monkeypatch):
    monkeypatch.setattr(predictor, "RECORDS_AT_ONCE", 1)
    lines = predictor_of(data=BadFirst()).lines()
    assert [line["prediction"] for line in lines] == [None, None, "odd", "odd"]


def test_a_record_that_was_divided_has_one_loss_over_the_terms_of_all_its_samples():
    first, second = predictor_of(data=Documents(), objective=Mean()).lines()
    assert first == {"id": 0, "source": "a:1", "loss": 2.0, "terms": 3}
    assert second == {"id": 1, "source": "a:3", "prediction": None, "error": "without text"}


class Given(Mean):
    """Predicts what it is given."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def predict(self, model, fields, text):
        return [self.values] * len(fields["input_ids"])


def test_a_choice_and_an_answer_are_as_their_record_has_them():
    objective = Given(prediction=1, probabilities=[0.25, 0.75])
    (line,) = predictor_of(data=Asked(), objective=objective).lines()
    assert (line["prediction"], line["probabilities"]) == ("y", {"x": 0.25, "y": 0.75})
    objective = Given(prediction="IT", start=2, end=6)
    (line,) = predictor_of(data=Asked(), objective=objective).lines()
    assert line == {"id": 2, "prediction": "it", "start": 4, "end": 6}


def test_of_many_classes_the_likeliest_are_written(monkeypatch):
    monkeypatch.setattr(predictor, "MOST_CHANCES", 2)
    monkeypatch.setattr(predictor, "LIKELIEST", 1)
    objective = Given(prediction=1, probabilities=[0.1, 0.6, 0.3])
    (line,) = predictor_of(data=Asked(), objective=objective).lines()
    assert line["probabilities"] == {"y": 0.6}


class ForOthers(Sums):
    """Takes other samples than these."""

    def forward(self, input_ids):
        raise ValueError("no pixels")


class Labelled(Mean):
    def weights(self, fields):
        return {"mean": float(len(fields["labels"]))}


class Unreadable(Tokens):
    rows = ([3, 4], [5, 2])


def test_what_nothing_can_be_said_of_is_named_in_a_line():
    with pytest.raises(ConfigError, match=r"objective=Labelled: predicts nothing, .*'labels'.*;"):
        [*predictor_of(objective=Labelled()).lines()]
    refused = r"data: the model cannot take them \(input_ids \(3, 1\).*: no pixels"
    with pytest.raises(ConfigError, match=refused):
        [*predictor_of(module=ForOthers()).lines()]
    for given in (7, [7] * 3, [{"loss": 1}] * 3, [{"prediction": 1}]):
        objective = Given()
        objective.predict = lambda *_, given=given: given
        with pytest.raises(ConfigError, match="objective=Given: `predict` has to give a mapping"):
            [*predictor_of(objective=objective).lines()]
    line, *_ = predictor_of(objective=Given(prediction=torch.tensor(1.5))).lines()
    assert line["prediction"] == 1.5
    with pytest.raises(DataError, match="data: row 0: ValueError: seven"):
        [*predictor_of(data=Unreadable()).lines()]
