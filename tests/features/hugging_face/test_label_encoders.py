"""Labels: words with tags stay apart, and columns of numbers and classes are told apart."""

import pytest

from tests.lib.hf_toys import TEXTS, save_tokenizer, write_lines
from trainer.features.hugging_face.data_set import HuggingFaceData
from trainer.features.hugging_face.label_encoders import find_labels


def test_words_in_a_row_are_encoded_as_in_a_text(tmp_path):
    """A tokenizer of bytes would join them."""
    tokenizer, words = save_tokenizer(tmp_path), TEXTS[0].split()
    file = write_lines(tmp_path / "ner.jsonl", [{"tokens": words, "tags": [1] * len(words)}])
    found = HuggingFaceData(str(file), tokenizer, "token_classification", holdout=0.0)[0]
    assert found["input_ids"].tolist() == tokenizer(f" {TEXTS[0]}")["input_ids"]
    assert found["labels"].tolist().count(1) == len(words)


def test_classes_of_a_loaded_head_are_known_however_they_are_spelt():
    head = ("POSITIVE", "NEGATIVE")
    labels = find_labels(["positive", "negative"], model=head)
    assert (labels.names, labels.number("positive")) == (head, 0)
    # Of words that differ by case alone each is a class.
    assert find_labels(["A", "a"], model=("a", "b")).names == ("A", "a")
    assert find_labels(["a", "A"], model=("a", "A")).number("A") == 1


def test_a_gap_in_a_column_of_numbers_makes_no_regression_of_it():
    labels = find_labels([0.0, None, 2.0])
    assert (labels.num_classes, labels.number(2.0)) == (3, 2)
    with pytest.raises(ValueError, match="the label None is not a number from 0"):
        labels.number(None)
    for real in ([0.5, None], [0.0, 2.0], [-1.0, None]):
        assert find_labels(real).num_classes is None


def test_words_are_no_labels_where_training_had_numbers():
    with pytest.raises(ValueError, match="labels are words here, but numbers in the data"):
        find_labels(["a", "b"], fixed=())
    assert find_labels([0, 1], fixed=()).num_classes == 2
