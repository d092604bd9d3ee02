"""Models and data of Hugging Face on the command line, without a line of code."""

from pathlib import Path

import pytest
import transformers

from tests.lib.heads import Head, save_causal_model, save_tokens
from tests.lib.run_support import TOYS, go, only_run, read_json, shell

pytestmark = [
    pytest.mark.usefixtures("own_folder"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

LOAD = (
    "model._target_=transformers.{}.from_pretrained model.pretrained_model_name_or_path=model "
    "data._target_=datasets.load_from_disk data.dataset_path=data"
)


def plan_of(folder: Path) -> dict[str, object]:
    return read_json(folder / "plan.json")


@pytest.mark.slow
def test_tags_of_tokens_are_learnt_as_they_are_and_a_resumed_run_keeps_its_objective(capsys):
    Head("BertForTokenClassification", "BertConfig", "tags").build().save_pretrained("model")
    save_tokens(Path("data"), "tags")
    run = go(f"{LOAD.format('AutoModelForTokenClassification')} steps=2")
    plan, shown = plan_of(run.folder), capsys.readouterr().out
    made = "as BertForTokenClassification is made for token_classification"
    assert plan["objective"] == f"token_classify, {made}"
    assert "  objective   token_classify, as" in shown
    assert "  init        weights of model, fp32 on disk, fp32 in memory" in shown
    goes_on = f"resume={run.folder} trust=[datasets]"
    assert shell(f"{goes_on} steps=3 objective=next_token") == 2
    assert "objective._target_=trainer.objectives.next_token.NextToken: the run has" in (
        capsys.readouterr().err
    )
    assert shell(f"{goes_on} steps=3") == 0
    assert shell(f"{goes_on} steps=4 objective=token_classify") == 0


def test_a_bf16_model_trains_in_fp32_and_is_evaluated_exported_and_loaded(capsys):
    save_causal_model(Path("model"))
    save_tokens(Path("data"))
    assert go(f"{LOAD.format('AutoModelForCausalLM')} steps=2").exit_code == 0
    dtypes = {"disk": "bf16", "memory": "fp32", "compute": "fp32"}
    assert plan_of(only_run())["dtypes"] == dtypes
    assert "weights of model, bf16 on disk, fp32 in memory" in capsys.readouterr().out
    assert shell("evaluate run=auto") == shell("export run=auto export.to=tuned") == 0
    model, faults = transformers.AutoModelForCausalLM.from_pretrained(
        "tuned", output_loading_info=True
    )
    assert not any(faults.values())
    assert str(model.dtype) == "torch.float32"


def test_low_precision_that_is_typed_is_what_the_start_says(capsys):
    save_causal_model(Path("model"))
    save_tokens(Path("data"))
    go(f"{LOAD.format('AutoModelForCausalLM')} model.dtype=bfloat16 steps=1")
    dtypes = {"disk": "bf16", "memory": "bf16", "compute": "bf16"}
    assert plan_of(only_run())["dtypes"] == dtypes
    assert "  compute     cpu, bf16" in capsys.readouterr().out


def test_bytes_under_a_vocabulary_that_is_not_theirs_are_warned_of(capsys):
    config = {"vocab_size": 700, "n_positions": 64}
    Head("GPT2LMHeadModel", "GPT2Config", "causal", config).build().save_pretrained("model")
    Path("notes.txt").write_text("\n\n".join(f"document {i}" for i in range(40)))
    line = LOAD.format("AutoModelForCausalLM").partition(" data.")[0]
    go(f"{line} data=text data.path=notes.txt data.max_length=32 steps=1")
    assert "loaded with a vocabulary of 700" in " ".join(capsys.readouterr().out.split())


NORM = f"model._target_={TOYS}.Net model.norm=batch batch.global=16 eval.every=null"


@pytest.mark.slow
def test_batch_norm_over_the_whole_step_is_taken_and_not_warned_of(capsys):
    for line in ("accum=auto accum.micro=16", "accum=fixed accum.micro=16"):
        run = go(f"{NORM} {line} steps=1 name={line.split()[0].partition('=')[2]}")
        plan = plan_of(run.folder)
        assert plan["micro_batches"] == 1
        assert plan["warnings"] == []
