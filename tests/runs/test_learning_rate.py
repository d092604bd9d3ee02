"""The learning rate that nobody typed: by the job, with its reason, kept where a run goes on."""

import shlex
from pathlib import Path

import pytest

from tests.lib.heads import Head, save_causal_model, save_tokens
from tests.lib.nightly import nightly, slow
from tests.lib.run_support import read_json
from trainer import train
from trainer.models.transform import ModelTransform

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

PLAIN = ["device=cpu", "wandb.mode=disabled", "batch.global=8", "steps=1", "scheduler.warmup=0"]
HF = "data._target_=datasets.load_from_disk data.dataset_path"
LOADED = {"betas": [0.9, 0.999], "weight_decay": 0.01}
DRAWN = {"betas": [0.9, 0.95], "weight_decay": 0.1}


class Doubled(ModelTransform):
    """An adapter, as far as the choice of a rate is concerned."""

    is_adapter = True

    def __call__(self, model):
        model.requires_grad_(False)
        next(model.parameters()).requires_grad_(True)
        return model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two models, and data for each."""
    here = tmp_path_factory.mktemp("models")
    save_causal_model(here / "gpt")
    Head("BertForMaskedLM", "BertConfig", "tags").build().save_pretrained(here / "body")
    save_tokens(here / "data")
    save_tokens(here / "tags", "tags")
    return here


@pytest.mark.parametrize(
    ("line", "expected", "reason"),
    [
        ("model=hf model.path=gpt", {"lr": 2e-5, **LOADED}, "as the weights are loaded from gpt"),
        (
            "model=hf model.path=body model.task=token_classification",
            {"lr": 5e-5, **LOADED},
            "as the head is new (classifier.bias, ...)",
        ),
        slow(
            f"model=hf model.path=gpt transforms=[{__name__}.Doubled]",
            {"lr": 2e-4, **LOADED},
            "as Doubled is an adapter",
        ),
        ("model=hf model.config=gpt", {"lr": 3e-4, **DRAWN}, "as the weights are drawn"),
        slow(
            "model=hf model.path=gpt optimizer.lr=0.5 'optimizer.betas=[0,0]'",
            {"weight_decay": 0.01},
            "",
        ),
        nightly(
            "model._target_=transformers.BertForTokenClassification.from_pretrained "
            "model.pretrained_model_name_or_path=body",
            {"lr": 5e-5, **LOADED},
            "as the head is new (classifier.bias, ...)",
        ),
        nightly("model=hf model.path=gpt optimizer=sgd", {}, ""),
    ],
)
def test_the_rate_follows_from_what_the_weights_are(
    line, expected, reason, models, monkeypatch, capsys
):
    monkeypatch.chdir(models)
    data = "tags" if "body" in line else "data"
    run = train(["command=plan", *PLAIN, *shlex.split(f"{HF}={data} {line}")])
    plan = read_json(run.folder / "plan.json")
    assert plan["optimizer_defaults"] == expected
    assert plan["lr"] == expected.get("lr", plan["lr"])
    assert (plan["optimizer_reason"] or "").startswith(reason)
    assert not expected or plan["optimizer_reason"] in " ".join(capsys.readouterr().out.split())
