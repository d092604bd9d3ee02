"""What the noise scale says of another batch is in plain words, and no more than it knows."""

import math

import pytest

from trainer.features.batch_size.advice import batch_advice, trade
from trainer.features.batch_size.noise_scale import NoiseEstimate

REMEDY = "batch.global={} scheduler.reference_batch=64 scheduler.scale=sqrt"


def advice(scale: float, low: float, high: float, count: int = 20, batch: int = 64) -> str | None:
    noise = NoiseEstimate(scale=scale, low=low, high=high, measurements=count)
    return batch_advice(noise, batch, "samples", least=2, most=1000, remedy=REMEDY)


def test_steps_and_samples_follow_the_law():
    fewest_steps, fewest_samples = 100.0, 100.0 * 310.0
    for batch, other in ((64, 256), (256, 32)):
        steps, samples = trade(310.0, batch, other)
        law = [fewest_steps * (1 + 310.0 / size) for size in (batch, other)]
        assert steps == pytest.approx(law[1] / law[0], rel=1e-12)
        law = [fewest_samples * (1 + size / 310.0) for size in (batch, other)]
        assert samples == pytest.approx(law[1] / law[0], rel=1e-12)


def test_a_larger_and_a_smaller_batch_are_advised_with_what_to_type():
    assert advice(310.0, 260.0, 370.0) == (
        "the gradient noise scale was about 310 samples (260 to 370); the global batch is 64. 256 "
        "would by estimate need 2.6x fewer steps and 1.5x more samples, which pays where more "
        "ranks share a step: try batch.global=256 scheduler.reference_batch=64 scheduler.scale=sqrt"
    )
    text = advice(20.0, 17.0, 24.0) or ""
    assert "32 would by estimate need 1.2x more steps and 1.6x fewer samples" in text
    assert "where samples take the time: try batch.global=32 " in text
    assert "try batch.global=512 " in (advice(1e6, 9e5, 1.1e6) or ""), "no more than 8 times"


@pytest.mark.parametrize(
    ("known", "words"),
    [
        ((80.0, 70.0, 90.0), "the global batch is 64, which is a fair one: 128 would by"),
        ((310.0, 130.0, 900.0), "was 130 to 900 samples, not settled; the global batch is 64. 128"),
        ((math.inf, 300.0, math.inf), "was 300 or more samples, not settled"),
        ((100.0, 30.0, 400.0), "too uncertain to advise another batch"),
        ((3000.0, 2500.0, 3500.0), "try batch.global=512"),
    ],
)
def test_it_is_said_how_uncertain_the_estimate_is(known, words):
    assert words in (advice(*known) or "")


def test_nothing_is_said_of_too_few_measurements_or_beyond_the_bounds():
    assert advice(310.0, 260.0, 370.0, count=4) is None
    text = advice(1.0, 0.9, 1.1, batch=4) or ""
    assert "try batch.global=2 " in text, "ranks need a sample"
    assert (advice(0.3, 0.28, 0.32, batch=2) or "").endswith("2 is the least for ranks and groups")
    assert "try batch.global=1000 " in (advice(9e3, 8e3, 9.9e3, batch=300) or ""), "of 1000 at most"
    text = advice(9e3, 8e3, 9.9e3, batch=1200) or ""
    assert text.endswith("none above 1,000, half an epoch, is advised")
    assert "try batch.global=8 " in (advice(0.0, 0.0, 0.0) or ""), "samples that are all alike"
