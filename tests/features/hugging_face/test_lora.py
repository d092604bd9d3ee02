"""Where matrices of low rank go, what they are called in files, and how they are merged."""

import pytest
import torch
import transformers
from torch import nn

from tests.lib.heads import Head
from trainer.core.errors import ConfigError
from trainer.features.hugging_face.lora import Lora
from trainer.models.first_weights import build_on_meta
from trainer.models.gpt import GPT

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def gpt(**settings: object) -> GPT:
    return GPT(vocab_size=19, width=8, num_layers=1, num_heads=2, max_length=16, **settings)


def trained(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def moved(model: nn.Module) -> nn.Module:
    """Give the matrices values that change what the model gives."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def test_all_linear_layers_but_the_output_have_matrices_and_nothing_else_is_trained():
    names = trained(Lora(r=2)(gpt()))
    ends = ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.out")
    expected = [f"blocks.0.{e}.lora_{m}.default.weight" for e in ends for m in "AB"]
    assert sorted(names) == sorted(expected)


def test_settings_of_peft_reach_its_layers():
    settings = {"lora_alpha": 8, "target_modules": ["qkv"], "modules_to_save": ["head"]}
    model = Lora(r=2, **settings, use_rslora=True)(gpt())
    layer = model.blocks[0].attention.qkv
    assert layer.scaling == {"default": 8 / 2**0.5}
    *matrices, head = trained(model)
    assert {name.rpartition(".lora_")[0] for name in matrices} == {"blocks.0.attention.qkv"}
    assert head == "head.modules_to_save.default.weight"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_on_the_meta_device_the_matrices_are_drawn_with_the_bits_of_the_cpu(dtype):
    def build() -> nn.Module:
        torch.set_default_dtype(dtype)
        base = gpt()
        torch.set_default_dtype(torch.float32)
        return Lora()(base)

    torch.manual_seed(3)
    here = build().state_dict()
    torch.manual_seed(3)
    _, drawn = build_on_meta(build)
    assert drawn.keys() == dict(build().named_parameters()).keys()
    assert all(torch.equal(drawn[name][...], here[name]) for name in drawn)
    widest = max(dtype, torch.float32, key=lambda each: each.itemsize)
    assert {here[name].dtype for name in here if "lora_" in name} == {widest}
    assert Lora().draws_on_meta
    # These read values.
    assert not Lora(modules_to_save=["head"]).draws_on_meta
    assert not Lora(use_dora=True).draws_on_meta


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_dora": True},
        {"modules_to_save": ["head"]},
        {"init_lora_weights": "pissa"},
        {"lora_bias": True, "target_modules": ["up"]},
        {"bias": "lora_only"},
    ],
    ids=str,
)
def test_peft_loads_what_is_saved_and_merging_changes_nothing(settings, tmp_path):
    import peft  # noqa: PLC0415 - seconds, of every process that collects tests

    ids = torch.arange(10)[None]
    lora = Lora(r=2, **settings)
    torch.manual_seed(0)
    model = moved(lora(gpt(mlp="gelu", bias=True)))
    lora.save(model, None, tmp_path)
    expected = model(ids)
    torch.manual_seed(0)
    again = peft.PeftModel.from_pretrained(gpt(mlp="gelu", bias=True), tmp_path)
    assert torch.allclose(again.eval()(ids), expected, atol=1e-6)
    merged = lora.merge(model)
    assert merged.state_dict().keys() == gpt(mlp="gelu", bias=True).state_dict().keys()
    assert torch.allclose(merged(ids), expected, atol=1e-5)


def test_a_tied_weight_is_not_merged_since_its_other_layer_would_change():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.second.weight = self.first.weight

    lora = Lora(target_modules=["first"])
    with pytest.raises(ConfigError, match="the weight of first is another layer's, too"):
        lora.merge(lora(Tied()))


def test_heads_that_peft_trains_whole_are_so_here():
    model = Lora()(Head("BertForTokenClassification", "BertConfig", "tags").build())
    assert model.peft_config["default"].modules_to_save == ["classifier"]
    assert model.peft_config["default"].task_type == "TOKEN_CLS"
    assert isinstance(model, transformers.BertForTokenClassification)
