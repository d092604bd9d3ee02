"""Images with a text: digits, JSON lines in two formats, and records that are bad."""

from typing import Any

import pytest
import torch
from PIL import Image

from tests.lib.hf_toys import write_lines
from trainer.features.hugging_face import tokenizers
from trainer.features.vision.image_text import ImageText

CHATML = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|eos|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def byte_tokenizer() -> Any:
    """What a run gives the data."""
    tokenizer = tokenizers.byte_tokenizer()
    tokenizer.add_tokens([*ImageText.special_tokens], special_tokens=True)
    return tokenizer


def learned(data: ImageText, i: int) -> str:
    """The tokens that are loss terms, as text."""
    labels = data[i]["labels"]
    return data.decode(labels[labels >= 0].tolist())


def test_a_digit_is_learned_behind_its_image_and_a_sentence():
    data = ImageText(byte_tokenizer())
    sample = data[3]
    assert len(data) == 1797
    assert data.vocab_size == 259
    assert (sample["input_ids"] == 258).sum() == 16  # parts of the image
    assert learned(data, 3) == " three<|eos|>"
    assert sample["pixel_values"].shape == (3, 16, 16)
    assert sample["pixel_values"].min() == -1
    assert len(sample["input_ids"]) == data.lengths[3]


@pytest.fixture
def picture(tmp_path):
    """A white image of 8 by 8."""
    Image.new("RGB", (8, 8), "white").save(tmp_path / "white.png")
    return tmp_path


def test_records_name_their_images_and_a_conversation_says_where_it_stands(picture):
    turns = ("human", "See <image>: what is it?"), ("gpt", "A wall.")
    said = [{"from": role, "value": text} for role, text in turns]
    pair = {"image": "white.png", "prompt": "It is", "completion": " white"}
    records = [pair, {"image": "white.png", "conversations": said}]
    tokenizer, file = byte_tokenizer(), write_lines(picture / "pairs.jsonl", records)
    tokenizer.chat_template = CHATML
    data = ImageText(tokenizer, str(file), image_size=4, patch_size=2)
    assert [learned(data, i) for i in range(2)] == [" white<|eos|>", "A wall.<|eos|>"]
    text = data.decode(data[1]["input_ids"].tolist())
    assert "See <image><image><image><image>: what" in text
    assert torch.equal(data[0]["pixel_values"], torch.ones(3, 4, 4))
