"""A model of transformers by its folder, its config or its class, without a line of code."""

from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from tests.lib.heads import MASKED, Head, save_causal_model, save_tokens
from tests.lib.nightly import nightly, slow
from tests.lib.run_support import go, overrides, read_json, shell, state
from trainer import train
from trainer.core.errors import ConfigError
from trainer.features.hugging_face.models import hugging_face

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

LINE = "model=hf data._target_=datasets.load_from_disk data.dataset_path=data"


def test_a_folder_is_trained_from_its_weights_and_exported_as_it_is_loaded(capsys):
    save_causal_model(Path("model"))
    save_tokens(Path("data"))
    run = go(f"{LINE} model.path=model steps=2")
    assert "  model          model, " in capsys.readouterr().out
    plan = read_json(run.folder / "plan.json")
    assert (plan["init"], plan["dtypes"]["disk"]) == ("weights of model", "bf16")
    assert shell(f"export run={run.folder} export.to=tuned") == 0
    model, faults = transformers.AutoModelForCausalLM.from_pretrained(
        "tuned", output_loading_info=True
    )
    assert not any(faults.values())
    assert all(state(run)[f"model.{name}"].equal(value) for name, value in model.named_parameters())


OWN = (
    "model._target_=transformers.AutoModelForCausalLM.from_pretrained "
    "model.pretrained_model_name_or_path=model data=text data.path=notes.txt data.max_length=32"
)


def test_low_precision_that_is_typed_and_bytes_under_another_vocabulary_are_said(capsys):
    config = {"vocab_size": 700, "n_positions": 64}
    Head("GPT2LMHeadModel", "GPT2Config", "causal", config).build().save_pretrained("model")
    Path("notes.txt").write_text("\n\n".join(f"document {i}" for i in range(40)))
    run = go(f"{OWN} model.dtype=bfloat16 steps=1")
    dtypes = {"disk": "fp32", "memory": "bf16", "compute": "bf16"}
    assert read_json(run.folder / "plan.json")["dtypes"] == dtypes
    shown = " ".join(capsys.readouterr().out.split())
    assert "device cpu, bf16" in shown
    assert "loaded with a vocabulary of 700" in shown


@pytest.mark.parametrize("line", ["accum=auto steps=1 eval.every=1", slow("command=verify")])
def test_once_a_trial_has_shown_that_it_may_a_causal_model_is_given_no_mask(line):
    MASKED.clear()
    go(f"{line} model._target_=tests.lib.heads.gpt2 data._target_=tests.lib.heads.causal")
    assert MASKED[:3] == [False, True, True], "the trial"
    assert len(MASKED) > 6
    assert not any(MASKED[3:])


def test_a_body_under_a_new_head_says_what_is_new(capsys):
    Head("BertForMaskedLM", "BertConfig", "tags").build().save_pretrained("model")
    save_tokens(Path("data"), "tags")
    run = go(f"{LINE} model.path=model model.task=token_classification steps=1")
    shown = " ".join(capsys.readouterr().out.split())
    assert "pretrained but for 2 tensors" in shown
    assert "token_classify, as the model is made for token_classification" in shown
    plan = read_json(run.folder / "plan.json")
    assert "2 new (classifier.bias, classifier.weight)" in plan["init"]
    assert "unused (cls.predictions" in plan["init"]


class Wrapper(nn.Module):
    """A user's own, around a model that is loaded."""

    def __init__(self, inner: nn.Module, num_more: int) -> None:
        super().__init__()
        self.inner = inner
        self.more = nn.Linear(num_more, num_more) if num_more else None

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids=input_ids, attention_mask=attention_mask).logits


def wrap(model: nn.Module, num_more: int) -> nn.Module:
    return Wrapper(model, num_more)


@pytest.mark.parametrize(("num_more", "lr"), [(0, 2e-5), nightly(3, 5e-5)])
def test_what_was_loaded_stays_loaded_when_a_transform_wraps_it(num_more, lr, capsys):
    save_causal_model(Path("model"))
    save_tokens(Path("data"))
    own = f"'transforms=[{{_target_: {__name__}.wrap, num_more: {num_more}}}]'"
    typed = overrides(f"{LINE} model.path=model {own} objective=next_token command=plan")
    typed = [each for each in typed if not each.startswith("optimizer.lr")]
    found = read_json(train(typed).folder / "plan.json")["optimizer_defaults"]
    assert found == {"lr": lr, "betas": [0.9, 0.999], "weight_decay": 0.01}
    shown = " ".join(capsys.readouterr().out.split())
    assert "weights of model, " in shown
    assert ("2 new (more.bias, more.weight)" in shown) == bool(num_more)


def test_a_pooler_that_no_pooling_reads_is_no_new_head(capsys):
    config = Head("BertModel", "BertConfig", "masked").build().config
    transformers.BertModel(config, add_pooling_layer=False).save_pretrained("model")
    assert hugging_face("model", task="embedding")[1].new == []
    _, facts = hugging_face("model", task="sequence_classification")
    assert "bert.pooler.dense.weight" in facts.new, "which reads it"


@pytest.mark.slow
def test_a_head_has_as_many_classes_as_are_typed_and_the_report_is_a_row(capfd):
    Head("BertForTokenClassification", "BertConfig", "tags").build().save_pretrained("tagger")
    Head("BertForMaskedLM", "BertConfig", "tags").build().save_pretrained("body")
    save_tokens(Path("data"), "tags")
    typed = f"{LINE} model.task=token_classification model.num_classes=5 steps=1"
    assert state(go(f"{typed} model.path=body"))["model.classifier.weight"].shape == (5, 8)
    assert "LOAD REPORT" not in "".join(capfd.readouterr())
    with pytest.raises(ConfigError, match=r"classifier\.bias is \(3,\) in the files and \(5,\)"):
        go(f"{typed} model.path=tagger")
    run = go(f"{typed} model.path=tagger model.ignore_mismatched_sizes=true")
    assert state(run)["model.classifier.weight"].shape == (5, 8)
    plan = read_json(run.folder / "plan.json")
    assert "2 new (classifier.bias, classifier.weight)" in plan["init"]
    assert plan["optimizer_reason"].startswith("as the head is new (")


def test_a_config_gives_random_weights_by_the_seed_and_is_found_from_another_folder(monkeypatch):
    save_causal_model(Path("model"))
    save_tokens(Path("data"))
    line = f"{LINE} model.config=model/config.json steps=1 optimizer.lr=1e-12"
    one, again, other = (state(go(f"{line} seed={seed}")) for seed in (0, 0, 1))
    name = next(n for n in one if n.endswith("wte.weight"))
    assert one[name].equal(again[name])
    assert not one[name].equal(other[name])
    run = go(line)
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert shell(f"resume={run.folder} steps=2 'trust=[datasets]'") == 0
