"""Models of transformers: dtypes of their weights, and the settings that their configs know."""

import pytest
import torch
from torch import nn

from tests.lib.heads import save_causal_model
from trainer.assemble.instantiate import construct
from trainer.config.components import Component
from trainer.core.errors import ConfigError
from trainer.features.hugging_face.library import PRETRAINED
from trainer.models.facts import facts_of

pytestmark = pytest.mark.filterwarnings("ignore")

TINY = {"vocab_size": 19, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
BERT = {"_target_": "transformers.BertConfig", "intermediate_size": 8, **TINY}


def built(target: str, *, typed: bool = True, **params: object) -> nn.Module:
    component = Component(target=f"transformers.{target}", params=params, typed_target=typed)
    return construct(component, "model", nn.Module)


def dtype_of(module: nn.Module) -> torch.dtype:
    return next(module.parameters()).dtype


def test_a_bf16_file_is_loaded_in_fp32_unless_a_dtype_is_typed(tmp_path):
    save_causal_model(tmp_path)
    load = {PRETRAINED: str(tmp_path)}
    target = "AutoModelForCausalLM.from_pretrained"
    assert facts_of(built(target, **load), {"model": load}).stored_dtypes() == ["bf16"]
    assert not facts_of(nn.Linear(1, 1), {PRETRAINED: str(tmp_path / "no")}).stored_dtypes()
    assert dtype_of(built(target, **load)) == torch.float32
    assert dtype_of(built(target, **load, dtype="bfloat16")) == torch.bfloat16
    assert dtype_of(built(target, **load, torch_dtype="bfloat16")) == torch.bfloat16


def test_weights_from_a_config_that_says_bf16_are_fp32_too(tmp_path):
    save_causal_model(tmp_path)
    config = {"_target_": "transformers.AutoConfig.from_pretrained", PRETRAINED: str(tmp_path)}
    target = "AutoModelForCausalLM.from_config"
    assert dtype_of(built(target, config=config)) == torch.float32
    assert dtype_of(built(target, config=config, dtype="bfloat16")) == torch.bfloat16


@pytest.mark.parametrize(
    ("params", "typed"),
    [
        ({"config": {**BERT, "num_labels": 5}}, True),  # a class that only its user may name
        ({"config": {**TINY, "num_labels": 5}}, False),
        ({**TINY, "num_labels": 5}, False),
    ],
    ids=["a config", "settings of a config", "settings of the model"],
)
def test_settings_that_the_config_knows_are_taken(params, typed):
    module = built("BertForSequenceClassification", typed=typed, **params)
    assert module.classifier.out_features == 5


def test_other_names_and_special_tokens_are_taken_and_a_wrong_name_is_refused():
    settings = {"d_model": 8, "num_heads": 2, "d_kv": 4, "num_hidden_layers": 1, "vocab_size": 19}
    module = built("T5ForConditionalGeneration", **settings, decoder_start_token_id=3)
    assert module.config.decoder_start_token_id == 3
    assert module.config.num_layers == 1
    with pytest.raises(ConfigError, match=r"takes no such argument\. Did you mean model\.num_lab"):
        built("BertForSequenceClassification", **TINY, num_lables=5)


def test_a_recipe_gives_no_setting_that_may_name_code():
    for name in ("attn_implementation", "name_or_path", "auto_map"):
        with pytest.raises(ConfigError, match=f"{name}: BertModel takes no such argument"):
            built("BertModel", typed=False, **TINY, **{name: "stranger/kernel"})
    module = built("BertModel", **TINY, attn_implementation="eager")
    assert module.config._attn_implementation == "eager"
