"""Models and data of Hugging Face on the command line, without a line of code."""

from pathlib import Path

import pytest

from tests.lib.heads import Head, save_causal_model, save_tokens
from tests.lib.run_support import go, only_run, read_json

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

LOAD = (
    "model._target_=transformers.{}.from_pretrained model.pretrained_model_name_or_path=model "
    "data._target_=datasets.load_from_disk data.dataset_path=data"
)


def plan_of(folder: Path) -> dict[str, object]:
    return read_json(folder / "plan.json")


def test_low_precision_that_is_typed_is_what_the_start_says(capsys):
    save_causal_model(Path("model"))
    save_tokens(Path("data"))
    go(f"{LOAD.format('AutoModelForCausalLM')} model.dtype=bfloat16 steps=1")
    dtypes = {"disk": "bf16", "memory": "bf16", "compute": "bf16"}
    assert plan_of(only_run())["dtypes"] == dtypes
    assert "  device         cpu, bf16" in capsys.readouterr().out


def test_bytes_under_a_vocabulary_that_is_not_theirs_are_warned_of(capsys):
    config = {"vocab_size": 700, "n_positions": 64}
    Head("GPT2LMHeadModel", "GPT2Config", "causal", config).build().save_pretrained("model")
    Path("notes.txt").write_text("\n\n".join(f"document {i}" for i in range(40)))
    line = LOAD.format("AutoModelForCausalLM").partition(" data.")[0]
    go(f"{line} data=text data.path=notes.txt data.max_length=32 steps=1")
    assert "loaded with a vocabulary of 700" in " ".join(capsys.readouterr().out.split())
