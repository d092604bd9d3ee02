"""What the noise scale says of another batch is in plain words, and no more than it knows."""

import math

import pytest

from trainer.features.batch_size.advice import batch_advice
from trainer.features.batch_size.noise_scale import NoiseEstimate

REMEDY = "batch.global={} scheduler.reference_batch=64 scheduler.scale=sqrt"
KNOWN = (310.0, 260.0, 370.0)


def advice(scale: float, low: float, high: float, count: int = 20, batch: int = 64) -> str | None:
    noise = NoiseEstimate(scale=scale, low=low, high=high, measurements=count)
    return batch_advice(noise, batch, "samples", least=2, most=1000, remedy=REMEDY)


def test_a_larger_batch_is_advised_with_what_to_type_and_nothing_of_too_few_measurements():
    # The steps are (1 + 310 / 256) / (1 + 310 / 64) of what they were, and samples four times that.
    assert advice(*KNOWN) == (
        "the gradient noise scale was about 310 samples (260 to 370); the global batch is 64. 256 "
        "would by estimate need 2.6x fewer steps and 1.5x more samples, which pays where more "
        "ranks share a step: try batch.global=256 scheduler.reference_batch=64 scheduler.scale=sqrt"
    )
    assert advice(*KNOWN, count=4) is None


@pytest.mark.parametrize(
    ("known", "batch", "words"),
    [
        ((20.0, 17.0, 24.0), 64, "32 would by estimate need 1.2x more steps and 1.6x fewer sa"),
        ((20.0, 17.0, 24.0), 64, "where samples take the time: try batch.global=32 "),
        ((1e6, 9e5, 1.1e6), 64, "try batch.global=512 "),  # no more than 8 times
        ((80.0, 70.0, 90.0), 64, "the global batch is 64, which is a fair one: 128 would by"),
        ((310.0, 130.0, 900.0), 64, "was 130 to 900 samples, not settled; the global batch is 64."),
        ((math.inf, 300.0, math.inf), 64, "was 300 or more samples, not settled"),
        ((100.0, 30.0, 400.0), 64, "too uncertain to advise another batch"),
        ((0.0, 0.0, 0.0), 64, "try batch.global=8 "),  # samples that are all alike
        ((1.0, 0.9, 1.1), 4, "try batch.global=2 "),  # ranks need a sample
        ((0.3, 0.28, 0.32), 2, "but 2 is the least for ranks and groups"),
        ((9e3, 8e3, 9.9e3), 300, "try batch.global=1000 "),
        ((9e3, 8e3, 9.9e3), 1200, "but none above 1,000, half an epoch, is advised"),
    ],
)
def test_the_advice_is_no_surer_than_the_estimate_and_within_bounds(known, batch, words):
    assert words in (advice(*known, batch=batch) or "")
