"""Labels: words with tags stay apart, and columns of numbers and classes are told apart."""

import pytest

from tests.lib.hf_toys import TEXTS, save_tokenizer, write_lines
from trainer.core.errors import DataError
from trainer.features.hugging_face.data_set import HuggingFaceData
from trainer.features.hugging_face.labels import find_labels, find_several, labels_in
from trainer.models.facts import model_library


def test_words_in_a_row_are_encoded_as_in_a_text(tmp_path):
    """A tokenizer of bytes would join them."""
    tokenizer, words = save_tokenizer(tmp_path), TEXTS[0].split()
    file = write_lines(
        tmp_path / "ner.jsonl", [{"tokens": words, "tags": [0, *[1] * (len(words) - 1)]}]
    )
    found = HuggingFaceData(str(file), tokenizer, "token_classification", holdout=0.0)[0]
    assert found["input_ids"].tolist() == tokenizer(f" {TEXTS[0]}")["input_ids"]
    assert found["labels"].tolist().count(1) == len(words) - 1


def test_classes_of_a_loaded_head_are_known_however_they_are_spelt():
    head = ("POSITIVE", "NEGATIVE")
    labels = find_labels(["positive", "negative"], model=head)
    assert (labels.names, labels.number("positive")) == (head, 0)
    # Of words that differ by case alone each is a class.
    assert find_labels(["A", "a"], model=("a", "b")).names == ("A", "a")
    assert find_labels(["a", "A"], model=("a", "A")).number("A") == 1


def test_as_many_classes_as_are_typed_keep_the_places_of_labels_with_a_gap():
    typed = {"task": "sequence_classification", "num_classes": 5}
    known = model_library().arguments_for_data("any.Class", typed, None)["model_labels"]
    found = find_labels([0, 4, 2], model=known)
    assert (found.num_classes, found.number(4), found.names) == (5, 4, None)
    assert find_labels([0, 5, 2], model=known).names == ("0", "2", "5")


def test_a_label_below_0_beside_others_stands_for_none():
    for values in ([-1, 0, 1], [2, -1, 1, 0, 0], ["1", "0", "-1"]):
        with pytest.raises(
            ValueError, match="the label -1 mostly stands for one that is not known"
        ):
            find_labels(labels_in(values, ()) if isinstance(values[0], str) else values)
    assert find_labels([-2, -1, 0, 1, 2]).num_classes == 5
    with pytest.raises(ValueError, match="the label -1 mostly stands for one that is not known"):
        find_labels([-1, -1], fixed=())
    assert find_labels([0, 1, -100]).number(-100) == -100


def test_a_gap_in_a_column_of_numbers_makes_no_regression_of_it():
    labels = find_labels([0.0, None, 2.0])
    assert (labels.num_classes, labels.number(2.0)) == (2, 1)
    with pytest.raises(ValueError, match="the label None is not one of 0, 2"):
        labels.number(None)
    for real in ([0.5, None], [0.0, 2.0], [-1.0, None]):
        assert find_labels(real).num_classes is None


def test_words_are_no_labels_where_training_had_numbers():
    with pytest.raises(ValueError, match="labels are words here, but numbers in the data"):
        find_labels(["a", "b"], fixed=())
    assert find_labels([0, 1], fixed=()).num_classes == 2


@pytest.mark.parametrize(
    ("values", "names", "numbers"),
    [
        ([1, 2, 3, 4, 5], ("1", "2", "3", "4", "5"), [0, 1, 2, 3, 4]),
        ([-1, 1], ("-1", "1"), [0, 1]),
        ([3, 10, 7], ("3", "7", "10"), [0, 2, 1]),
        ([0, 1, 2], None, [0, 1, 2]),
    ],
)
def test_whole_numbers_that_do_not_begin_at_0_without_a_gap_are_classes_by_name(
    values, names, numbers
):
    labels = find_labels(values)
    assert (labels.names, labels.num_classes) == (names, len(values))
    assert [labels.number(value) for value in values] == numbers
    assert [labels.number(str(value)) for value in values] == numbers, "as CSV writes them"
    again = find_labels(values[:2], fixed=names or ())
    assert [again.number(value) for value in values[:2]] == numbers[:2], "data to evaluate on"
    head = find_labels(values, model=("a", "b", "c", "d", "e", "f"))
    if min(values) >= 0 and max(values) < 6:
        assert (head.names, head.num_classes) == (None, 6), "a loaded head keeps its numbers"


@pytest.mark.parametrize(
    ("rows", "columns", "kind", "names", "expected"),
    [
        ([["a"], ["c", "a"], [], ["b"]], (), "flags", ("a", "b", "c"), [1, 0, 1]),
        ([[1], [3, 1], [], [2]], (), "flags", ("1", "2", "3"), [1, 0, 1]),
        ([[1, 0, 0], [True, 0.0, 1]], (), "flags", None, [1, 0, 1]),
        ([["1", "0"], ["0", ""]], ("x", "y z"), "flags", ("x", "y z"), [0, -100]),
        ([["1.5", "0"], ["2", "-3"]], ("x", "y"), "numbers", ("x", "y"), [2, -3]),
        ([[0.5, 1.5], [2.0, 3.0]], (), "numbers", None, [2, 3]),
        ([[4, 4, 0], [5, 3, 1]], (), "numbers", None, [5, 3, 1]),
    ],
)
def test_several_labels_of_a_record_are_flags_or_numbers(rows, columns, kind, names, expected):
    labels = find_several(rows, columns=columns)
    assert (labels.kind, labels.names, labels.num_classes) == (kind, names, len(expected))
    assert labels.value(rows[1]).tolist() == expected
    for wrong in ("a", ["q"] * len(expected)):
        with pytest.raises(ValueError, match=r"is no|is not|is neither"):
            labels.value(wrong)
    # The places of a known head are others, so that these name what applies.
    for how in ({"model": "abcde"}, {"stated": "abcde"}):
        assert find_several([[4, 1], [2, 0]], **how).value([4, 1]).tolist() == [0, 1, 0, 0, 1]


def test_flags_are_from_0_to_1_or_the_numbers_of_what_applies():
    assert find_several([[4, 1], [2, 3]], of_flags=True).value([4, 1]).tolist() == [1, 0, 0, 1]
    with pytest.raises(ValueError, match="a label is not from 0 to 1: type objective=regression"):
        find_several([["1", "0"], ["2", "0"]], columns=("x", "y"), of_flags=True)


@pytest.mark.parametrize(
    ("labels", "bad", "why"),
    [
        (["a", {"id": 3}, "b"], 2, r"the label \{'id': 3\} is not one of a, b"),
        ([["a"], [{"id": 3}], ["b"]], 2, r"the label \{'id': 3\} is not one of a, b"),
        ([[0, 1], [{"id": 3}, 1], [1, 1]], 2, r"the label \{'id': 3\} is neither 0 nor 1"),
        ([["a"], "a", "b"], 1, r"the label \['a'\] is a list, and other records have one label"),
        (["a", ["a"], [], ["b"]], 1, "the label 'a' is no list, as other records have it"),
    ],
)
def test_a_label_of_another_kind_than_most_is_a_bad_record(tmp_path, labels, bad, why):
    tokenizer = save_tokenizer(tmp_path)
    records = [{"text": "the sums", "label": label} for label in (*labels, *labels[2:] * 9)]
    file = write_lines(tmp_path / "a.jsonl", records)
    with pytest.raises(DataError, match=rf"a.jsonl:{bad}: {why}"):
        HuggingFaceData(str(file), tokenizer, "sequence_classification")
    data = HuggingFaceData(str(file), tokenizer, "sequence_classification", on_bad="skip")
    assert data.facts().num_classes == 2
