"""Numbers, durations and text as a person reads them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.core import format


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (973.4, "973"),
        (999.6, "1.00k"),
        (41_234, "41.2k"),
        (1_240_000, "1.24M"),
        (9.99e9, "9.99B"),
        (3e15, "3000T"),
        (math.nan, "-"),
        (None, "-"),
    ],
)
def test_a_magnitude_is_short(value, shown):
    assert format.short(value) == shown


@given(st.floats(min_value=0, max_value=9e14))
def test_a_magnitude_takes_at_most_five_characters(value):
    assert len(format.short(value)) <= 5


@given(st.floats(min_value=1, max_value=9e14))
def test_a_magnitude_is_within_half_a_percent(value):
    text = format.short(value)
    unit = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1], 1.0)
    shown = float(text.rstrip("kMBT")) * unit
    assert abs(shown - value) <= max(0.5, 0.0051 * value)


@pytest.mark.parametrize(
    ("num_bytes", "shown"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.98 KiB"),
        (412 << 20, "412 MiB"),
        (13 << 30, "13.0 GiB"),
        (1023 << 20, "1.00 GiB"),
        (5 << 40, "5.00 TiB"),
        (None, "unknown"),
    ],
)
def test_bytes_are_in_binary_units(num_bytes, shown):
    assert format.size(num_bytes) == shown


@pytest.mark.parametrize(
    ("seconds", "words", "clock"),
    [
        (0.0421, "42.1 ms", "0:00"),
        (0.9999, "1.0 s", "0:01"),
        (8.44, "8.4 s", "0:08"),
        (9.97, "10 s", "0:10"),
        (59.7, "1 min 0 s", "1:00"),
        (128, "2 min 8 s", "2:08"),
        (12_000, "3 h 20 min", "3:20:00"),
        (371_000, "4 d 7 h", "4d 07:03"),
        (None, "unknown", "-:--"),
        (math.inf, "unknown", "-:--"),
    ],
)
def test_a_duration_reads_as_words_and_as_a_clock(seconds, words, clock):
    assert format.duration(seconds) == words
    assert format.clock(seconds) == clock


@pytest.mark.parametrize(
    ("count", "noun", "shown"),
    [
        (1, "rank", "1 rank"),
        (11, "micro-batch", "11 micro-batches"),
        (8192, "sample", "8,192 samples"),
        (0, "step", "0 steps"),
    ],
)
def test_a_count_agrees_with_its_noun(count, noun, shown):
    assert format.plural(count, noun) == shown


def test_a_loss_that_is_not_finite_says_so():
    assert format.loss(2.71828) == "2.7183"
    assert format.loss(1.5e7) == "1.500e+07"
    assert format.loss(math.nan) == format.loss(None) == "not finite"


def test_rates_keep_three_digits_over_all_magnitudes():
    assert [format.rate(x) for x in (0, 0.83, 12.31, 2e-4, 4e6, None)] == [
        "0.00",
        "0.83",
        "12.3",
        "2.00e-04",
        "4.00e+06",
        "-",
    ]


@given(st.text())
def test_no_control_character_survives(text):
    assert format.printable(text).isprintable()


def test_ordinary_text_is_printed_as_it_is():
    assert format.printable("def f(x): return 'é'") == "def f(x): return 'é'"
    assert format.printable("a\n\x1b[31mb") == "a\\n\\x1b[31mb"


def test_a_path_is_relative_below_the_current_folder_and_quoted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert format.shown_path(tmp_path / "outputs" / "run") == "outputs/run"
    assert format.shown_path(Path("a b")) == "'a b'"
    assert format.shown_path(Path("/elsewhere/run")) == "/elsewhere/run"
