"""Words with tags stay apart where a tokenizer of bytes would join them."""

from functools import partial

import pytest

from tests.lib.hf_toys import TEXTS, save_tokenizer
from trainer.features.hugging_face import label_encoders
from trainer.features.hugging_face.encode import RecordEncoder
from trainer.features.hugging_face.formats import Format


def test_words_in_a_row_are_encoded_as_in_a_text(tmp_path):
    tokenizer = save_tokenizer(tmp_path)
    space = label_encoders.space_before_words(tokenizer)
    words = TEXTS[0].split()
    encoder = RecordEncoder(
        format=Format("tags", {}),
        is_json=True,
        tokenizer=tokenizer,
        max_length=64,
        overlong="cut",
        fields_of=partial(
            label_encoders.tag_fields, labels=label_encoders.Labels(None, 9), space=space
        ),
    )
    found = encoder.fields_of(encoder, {"tokens": words, "tags": [1] * len(words)})
    assert found["input_ids"] == tokenizer(f" {TEXTS[0]}")["input_ids"]
    assert found["labels"].count(1) == len(words)


def test_classes_of_a_loaded_head_are_known_however_they_are_spelt():
    head = ("POSITIVE", "NEGATIVE")
    labels = label_encoders.find_labels(["positive", "negative"], model=head)
    assert (labels.names, labels.number("positive")) == (head, 0)
    # Of words that differ by case alone each is a class.
    assert label_encoders.find_labels(["A", "a"], model=("a", "b")).names == ("A", "a")
    assert label_encoders.find_labels(["a", "A"], model=("a", "A")).number("A") == 1


def test_a_gap_in_a_column_of_numbers_makes_no_regression_of_it():
    labels = label_encoders.find_labels([0.0, None, 2.0])
    assert (labels.num_classes, labels.number(2.0)) == (3, 2)
    with pytest.raises(ValueError, match="the label None is not a number from 0"):
        labels.number(None)
    for real in ([0.5, None], [0.0, 2.0], [-1.0, None]):
        assert label_encoders.find_labels(real).num_classes is None


def test_words_are_no_labels_where_training_had_numbers():
    with pytest.raises(ValueError, match="labels are words here, but numbers in the data"):
        label_encoders.find_labels(["a", "b"], fixed=())
    assert label_encoders.find_labels([0, 1], fixed=()).num_classes == 2
