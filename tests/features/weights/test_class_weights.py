"""Class weights by name, or by how often each class is there, and by what a run has of them."""

from typing import ClassVar

import pytest
import torch

from tests.lib.run_support import TOYS, go, on
from tests.lib.run_toys import Images
from trainer.core.errors import ConfigError
from trainer.data.samples import DataFacts
from trainer.data.view import DataView
from trainer.features.weights.feature import WeightsOfRun
from trainer.objectives.classify import Classify

LABELS = [0, 1, 1, 1, 2, -100]


class Mails:
    """Samples with a class each, of which nothing counts them before."""

    names = ("ham", "spam", "junk")

    def __len__(self):
        return len(LABELS)

    def __getitem__(self, i):
        return {"x": torch.zeros(2), "labels": torch.tensor(LABELS[i])}

    def facts(self):
        return DataFacts(label_names=self.names, num_classes=3, draws_randomness=False)


def weights(given):
    return WeightsOfRun().decided(Classify(class_weights=given), DataView(Mails()), {})


def test_class_weights_go_by_name_or_by_how_often_a_class_is_there():
    # 5 samples / (3 classes x 1, 3, 1 of them), as scikit-learn has it
    assert weights("balanced")["class_weights"] == pytest.approx([5 / 3, 5 / 9, 5 / 3])
    assert weights({"spam": 2})["class_weights"] == [1.0, 2, 1.0]
    assert weights([1, 2, 3]) == {}
    with pytest.raises(ConfigError, match=r"class_weights=\{spma: 2\}: no such class\. .*spam"):
        weights({"spma": 2})


class CountedImages(Images):
    """Images that note when their classes are counted."""

    counts: ClassVar[list[int]] = []

    def facts(self):
        return DataFacts(num_classes=4, class_counts=self.count, draws_randomness=False)

    def count(self):
        self.counts.append(len(self))
        return [12, 6, 9, 9]


def test_a_run_that_goes_on_has_its_class_weights_and_counts_nothing_again():
    data = f"data._target_={__name__}.CountedImages model._target_={TOYS}.Vision"
    run = go(f"{data} objective=classify objective.class_weights=balanced batch.global=8 steps=1")
    assert CountedImages.counts
    CountedImages.counts.clear()
    assert on(run, "steps=2").result["step"] == 2
    assert not CountedImages.counts
