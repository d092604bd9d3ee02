"""Models of transformers loaded without their weights, which are then read row by row."""

from pathlib import Path

import pytest
import torch

from tests.lib.heads import Head
from tests.lib.nightly import nightly
from trainer.features.hugging_face.models import hugging_face
from trainer.models.first_weights import FIRST_WEIGHTS

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def save(folder: Path, name: str, config: str) -> None:
    """Save a model in bf16 and in several files."""
    torch.manual_seed(0)
    head = Head(name, config, "causal").build().to(torch.bfloat16)
    with torch.no_grad():
        for buffer in head.buffers():
            if buffer.is_floating_point():
                buffer.add_(0.25)
    head.save_pretrained(folder, max_shard_size=500)
    assert len([*folder.glob("*.safetensors")]) > 1


def both(folder: Path, **settings):
    """The same model with its weights, and on the meta device."""
    torch.manual_seed(5)
    whole, _ = hugging_face(str(folder), **settings)
    torch.manual_seed(5)
    with torch.device("meta"):
        lazy, _ = hugging_face(str(folder), **settings)
    return whole, lazy


@pytest.mark.parametrize(
    ("name", "config", "task"),
    [
        ("GPT2LMHeadModel", "GPT2Config", "causal_lm"),
        ("BertForMaskedLM", "BertConfig", "token_classification"),  # a new head
        nightly("T5ForConditionalGeneration", "T5Config", "seq2seq_lm"),
        nightly("ResNetForImageClassification", "ResNetConfig", "image_classification"),
    ],
)
def test_each_weight_is_read_from_its_place_in_the_files(name, config, task, tmp_path):
    save(tmp_path, name, config)
    whole, lazy = both(tmp_path, task=task)
    first = getattr(lazy, FIRST_WEIGHTS)
    expected = dict(whole.named_parameters(remove_duplicate=False))
    assert all(p.is_meta for p in lazy.parameters())
    assert first.keys() == expected.keys()
    for key, value in expected.items():
        assert first[key].dtype == value.dtype == torch.float32
        assert torch.equal(first[key][...], value)
        if value.dim():
            assert torch.equal(first[key][1:2], value[1:2])
    buffers = dict(whole.named_buffers())
    assert all(torch.equal(value, buffers[key]) for key, value in lazy.named_buffers())
    ties = [len({id(p) for p in model.parameters()}) for model in (whole, lazy)]
    assert ties[0] == ties[1]


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("MixtralForCausalLM", "MixtralConfig"),  # experts are put together
        nightly("BertForMaskedLM", "BertConfig"),  # its bias is padded
    ],
)
def test_weights_that_are_computed_from_those_in_the_files_have_no_place(name, config, tmp_path):
    save(tmp_path, name, config)
    with torch.device("meta"):
        lazy, _ = hugging_face(str(tmp_path))
    assert not hasattr(lazy, FIRST_WEIGHTS)
    assert next(lazy.parameters()).is_meta
