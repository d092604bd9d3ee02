"""`adapter=lora`: what is trained, stored, resumed and exported, and what is refused."""

from pathlib import Path

import pytest
import torch
import transformers

from tests.lib.heads import Examples, Head, save_tokens
from tests.lib.nightly import nightly, slow
from tests.lib.run_support import curve, go, overrides, read_json, shell, state
from tests.reliability.rank_work import on_ranks
from trainer import train
from trainer.cli.python_api import FinishedRun
from trainer.core.errors import ConfigError, NoCheckpointError

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)

DATA = "data._target_=datasets.load_from_disk data.dataset_path"
LLAMA = f"model=hf model.path=llama adapter=lora {DATA}=causal optimizer.lr=0.05 steps=3"
GPT = (
    "model=gpt_tiny model.width=16 model.num_layers=2 model.num_heads=2 data=text "
    "data.path=corpus.txt data.max_length=32 optimizer.lr=0.05 steps=3"
)
IDS = torch.arange(3, 15)[None]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """A run with an adapter, in a folder that all tests share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("adapters"))
        torch.manual_seed(0)
        deep = {"num_hidden_layers": 2}
        Head("LlamaForCausalLM", "LlamaConfig", "causal", deep).build().save_pretrained("llama")
        Head("BertForMaskedLM", "BertConfig", "masked", deep).build().save_pretrained("bert")
        wide = {**deep, "hidden_size": 16}
        Head("LlamaForCausalLM", "LlamaConfig", "causal", wide).build().save_pretrained("wide")
        save_tokens(Path("causal"))
        Path("corpus.txt").write_text("\n\n".join(f"Line {i} of {i % 7}" * 2 for i in range(60)))
        run = go(LLAMA)
        export(run, "first")
        return run


@pytest.fixture(autouse=True)
def _beside(made: FinishedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(made.folder.parents[2])


def loaded_as_shown(shown: str) -> torch.nn.Module:
    """Run the lines of Python that an export prints."""
    names: dict[str, torch.nn.Module] = {}
    exec(shown[shown.index("  from peft import") :].replace("\n  ", "\n").strip(), names)
    return names["model"]


def export(run: FinishedRun, to: str, more: str = "") -> None:
    assert shell(f"export run={run.folder} export.to={to} 'trust=[datasets]' {more}") == 0


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


def test_peft_loads_the_adapter_and_transformers_the_merged_model_with_equal_logits(
    made, monkeypatch, capsys
):
    import peft  # noqa: PLC0415 - seconds, of every process that collects tests

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    export(made, "merged", "export.merge=true")
    base = transformers.AutoModelForCausalLM.from_pretrained("llama")
    before = logits(base)
    adapted = logits(peft.PeftModel.from_pretrained(base, "first"))
    assert (adapted - before).abs().max() > 1e-2
    export(made, "shown")
    assert torch.equal(logits(loaded_as_shown(capsys.readouterr().out)), adapted)
    merged, faults = transformers.AutoModelForCausalLM.from_pretrained(
        "merged", output_loading_info=True
    )
    assert not any(faults.values())
    assert torch.allclose(logits(merged), adapted, atol=1e-5)
    assert read_json(Path("first/adapter_config.json"))["base_model_name_or_path"].endswith("llama")


@pytest.mark.slow
def test_a_run_goes_on_bit_for_bit_from_its_adapter_alone_and_not_with_another_rank(made):
    line = f"{LLAMA} scheduler=constant adapter.lora_dropout=0.1"
    early, whole = go(f"{line} steps=2"), go(line)
    train([f"resume={early.folder}", "steps=3", "trust=[datasets]"])
    assert all(torch.equal(state(early)[name], tensor) for name, tensor in state(whole).items())
    assert all("lora_" in name for name in state(whole) if name.startswith("model."))
    with pytest.raises(ConfigError, match=r"adapter\.r=4: the run has 8"):
        train([f"resume={made.folder}", "adapter.r=4", "steps=5", "trust=[datasets]"])


class Named(Examples):
    """Samples of classes that have names."""

    label_names = ("low", "even", "high")

    def __init__(self) -> None:
        super().__init__("class")


CLASSIFIER = (
    "model=hf model.path=bert model.task=sequence_classification adapter=lora "
    f"data._target_={__name__}.Named optimizer.lr=0.05 steps=3"
)


@pytest.mark.parametrize(
    ("line", "bound"),
    # Matrices of fp32 beside bf16.
    [slow(f"{GPT} init=", 1e-5), nightly(f"{LLAMA} model.dtype=bfloat16", 1e-2)],
)
def test_two_ranks_take_the_same_steps(line, bound, ranks):
    if line.endswith("init="):
        line += str(go(GPT).folder)
    line = f"{line} adapter=lora"
    one = go(line)
    two = on_ranks(ranks, overrides(f"{line} parallel=fsdp parallel.ranks=2"))
    for name in ("loss", "grad_norm"):
        assert curve(two, name) == pytest.approx(curve(one, name), rel=bound), name
    assert state(two).keys() == state(one).keys()


def test_the_step_of_an_adapter_is_exact_packed_and_recomputed_too(made):
    line = f"{LLAMA} accum.packed=true activation_checkpointing=true"
    assert train(["verify", *overrides(line)]).result["verdict"] == "exact"
    assert curve(go(line), "loss") == pytest.approx(curve(made, "loss"), rel=1e-5)


@pytest.mark.slow
def test_a_new_head_is_trained_whole_and_stored_with_the_adapter(monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    run = go(CLASSIFIER)
    export(run, "classifier")
    shown = capsys.readouterr().out
    export(run, "merged_classifier", "export.merge=true")
    stored = read_json(Path("classifier/adapter_config.json"))
    assert stored["modules_to_save"] == ["bert.pooler", "classifier"]
    loaded = loaded_as_shown(shown)
    assert loaded.config.id2label == dict(enumerate(Named.label_names))
    adapted = logits(loaded)
    merged = transformers.AutoModelForSequenceClassification.from_pretrained("merged_classifier")
    assert torch.allclose(logits(merged), adapted, atol=1e-5)


@pytest.mark.parametrize(
    ("typed", "fault"),
    [
        (
            "adapter.r=4",
            r"different model\.layers.* \[8, 8\] in the checkpoint, .* \[4, 8\] in the",
        ),
        (
            "model.path=wide",
            "model.path=.*wide: init=.*first was trained on .*llama; type model.path=",
        ),
        ("adapter.lora_alpha=16", "adapter.lora_alpha=16: init=.*first was trained with 8"),
        ("adapter=none", "init=.*first: holds an adapter, without its base; type adapter=lora"),
    ],
)
def test_an_adapter_of_another_base_or_scale_is_refused_in_a_line(typed, fault):
    with pytest.raises((ConfigError, NoCheckpointError), match=fault) as caught:
        go(f"{LLAMA} init=first {typed}")
    assert len(str(caught.value).splitlines()) == 1
