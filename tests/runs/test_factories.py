"""Models from a factory, a class method or classes within: trained, and everything after that."""

from __future__ import annotations

import shlex

import pytest

from tests.lib.nightly import nightly
from tests.lib.run_support import TOYS, go, only_run, read_json, shell

pytestmark = pytest.mark.usefixtures("own_folder")

GPT2 = (
    "model.config._target_=transformers.GPT2Config model.config.vocab_size=16 "
    "model.config.n_layer=1 model.config.n_embd=8 model.config.n_head=2 "
    "model.config.embd_pdrop=0 model.config.attn_pdrop=0 model.config.resid_pdrop=0"
)
MODELS = {
    "classes within": (
        f"model._target_={TOYS}.Whole model.net._target_={TOYS}.Net model.net.width=4 "
        "model.norm._target_=torch.nn.LayerNorm model.norm._partial_=true "
        "'model.more=[{_target_:torch.nn.Linear,in_features:16,out_features:16}]'"
    ),
    "from_config": (
        "model._target_=transformers.AutoModelForCausalLM.from_config "
        f"model.attn_implementation=eager {GPT2}"
    ),
}


@pytest.mark.parametrize("model", ["classes within", nightly("from_config")])
def test_a_model_that_a_factory_makes_does_all_that_a_model_does(model, capsys):
    go(f"{MODELS[model]} steps=2 eval.every=2 data.holdout=0.2")
    run = only_run()
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  train ")]
    words = [line.split()[1].partition("=")[0] for line in printed]
    assert words == ["evaluate", "export", "resume"]
    for line in printed:
        assert shell(line.removeprefix("  train ")) == 0, line
    assert read_json(run / "result.json")["step"] == 4
    trust = shlex.join(word for word in shlex.split(printed[0]) if word.startswith("trust="))
    assert shell(f"verify run={run} {trust}") == 0
    assert go(f"{MODELS[model]} init=exported steps=1").exit_code == 0
