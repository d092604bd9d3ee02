"""Which settings are said to type the model of some weights."""

import json

import pytest

from trainer.checkpoint.stated_model import settings_of_model

NET = {"_target_": "net.Net", "width": 16}
TINY = {"_target_": "trainer.models.gpt.GPT", "width": 48, "num_layers": 2}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model": NET}, "model._target_=net.Net model.width=16"),
        ({"architectures": ["LlamaForCausalLM"]}, "model=hf model.path=weights"),
        ({"model": TINY, "choices": {"model": "gpt_tiny"}}, "model=gpt_tiny model.width=48"),
        ({}, None),
    ],
)
def test_a_folder_of_weights_says_how_its_model_is_typed(config, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    assert settings_of_model(folder) == says
    assert settings_of_model(folder / "config.json") == says
