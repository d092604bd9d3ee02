"""Numbers, durations and text as a person reads them."""

from pathlib import Path

from hypothesis import example, given
from hypothesis import strategies as st

from trainer.core import format

SHOWN = {
    format.short: "0: 0, 973.4: 973, 999.6: 1.00k, 41_234: 41.2k, 1.24e6: 1.24M, 9.99e9: 9.99B, "
    "3e15: 3000T, nan: -, None: -",
    format.size: "0: 0 B, 999: 999 B, 1000: 0.98 KiB, 432_013_312: 412 MiB, 13_958_643_712: 13.0 "
    "GiB, 1_072_693_248: 1.00 GiB, 5_497_558_138_880: 5.00 TiB, None: unknown",
    format.duration: "0.0421: 42.1 ms, 0.9999: 1.0 s, 8.44: 8.4 s, 9.97: 10 s, 59.7: 1 min 0 s, "
    "128: 2 min 8 s, 3599.7: 1 h 0 min, 12_000: 3 h 20 min, 371_000: 103 h 3 min, None: unknown, "
    "inf: unknown",
    format.clock: "0.0421: 0:00:00, 59.7: 0:01:00, 128: 0:02:08, 12_000: 3:20:00, "
    "None: -:--, inf: -:--",
    format.loss: "2.71828: 2.7183, 1.5e7: 1.500e+07, nan: not finite, None: not finite",
    format.rate: "0: 0.00, 0.83: 0.83, 12.31: 12.3, 2e-4: 2.00e-04, 4e6: 4.00e+06, None: -",
}


def test_a_person_can_read_it():
    for write, table in SHOWN.items():
        for value, shown in (pair.split(": ") for pair in table.split(", ")):
            assert write(None if value == "None" else float(value)) == shown, (write, value)


def test_a_small_mean_of_an_evaluation_keeps_its_sign_and_size():
    means = {"loss": 0.6932, "margin": -2.1864e-5, "accuracy": 0.0, "f1": float("nan")}
    written = ["held out 0.6932", "margin -2.186e-05", "accuracy 0.0000", "f1 nan"]
    assert format.figure_texts(means, {"loss": "held out"}) == written


def test_a_count_agrees_with_its_noun():
    pairs = ((1, "rank"), (11, "micro-batch"), (8192, "sample"), (0, "step"), (2, "class"))
    written = [format.plural(*pair) for pair in pairs]
    assert written == ["1 rank", "11 micro-batches", "8,192 samples", "0 steps", "2 classes"]


@given(st.text())
@example("def f(x): return 'é'")
def test_no_control_character_survives_and_all_else_does(text):
    assert format.printable(text).isprintable()
    assert format.printable("a\n\x1b[31mb") == "a\\n\\x1b[31mb"
    assert not text.isprintable() or format.printable(text) == text


def test_a_path_is_relative_below_the_current_folder_and_quoted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert format.shown_path(tmp_path / "outputs" / "run") == "outputs/run"
    assert format.shown_path(Path("a b")) == "'a b'"
    assert format.shown_path(Path("/elsewhere/run")) == "/elsewhere/run"
