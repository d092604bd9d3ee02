"""What `train export` writes, by the lines of Python that it prints."""

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.lib.heads import Head
from tests.lib.hf_toys import TEXTS, save_tokenizer, write_lines
from tests.lib.run_support import go, shell, state
from trainer.cli.python_api import FinishedRun
from trainer.models.gpt import GPT

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

CHAT = (
    "{% for m in messages %}<s>{% generation %}{{ m.content }}</s>{% endgeneration %}{% endfor %}"
)
WORDS = "the sums of a step"


def save_base(name: str, config: str, **settings: int) -> None:
    """Save a model and its tokenizer."""
    torch.manual_seed(0)
    Head(name, config, "causal", {"vocab_size": 300, **settings}).build().save_pretrained("base")
    save_tokenizer(Path("base"))


def exported(capsys) -> dict:
    """Export the newest run, and run the lines that it prints."""
    capsys.readouterr()
    assert shell("export run=auto export.to=out 'trust=[datasets]'") == 0
    lines = [line[2:] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    names: dict = {}
    exec("\n".join(lines), names)
    return names | {"lines": lines}


DATA = "data=hf data.path=data.jsonl steps=1"


@pytest.fixture(autouse=True)
def texts(own_folder: None) -> None:
    write_lines(Path("data.jsonl"), [{"text": text} for text in TEXTS])


def assert_is_trained(found: dict, run: FinishedRun) -> None:
    """Compare all weights, and the ids that the tokenizer gives, with those of the run."""
    trained = state(run)
    for name, parameter in found["model"].named_parameters():
        assert parameter.equal(trained[f"model.{name}"]), name
    base = transformers.AutoTokenizer.from_pretrained("base")
    assert found["tokenizer"](WORDS)["input_ids"] == base(WORDS)["input_ids"]


def test_a_classifier_is_loaded_as_it_was_trained_with_the_names_of_its_classes(capsys):
    save_base("BertModel", "BertConfig", num_labels=3)
    named = zip(TEXTS, ("bad", "good", "fair") * 20, strict=True)
    write_lines(Path("data.jsonl"), [{"text": text, "label": label} for text, label in named])
    run = go(f"model=hf model.path=base model.task=sequence_classification {DATA}")
    found = exported(capsys)
    assert "AutoModelForSequenceClassification" in found["lines"][0]
    assert_is_trained(found, run)
    assert found["tokenizer"].chat_template is None
    assert found["model"].config.id2label == {0: "bad", 1: "fair", 2: "good"}
    assert found["model"].config.label2id == {"bad": 0, "fair": 1, "good": 2}


@pytest.mark.slow
def test_a_model_of_chats_is_loaded_with_the_template_that_was_typed(capsys):
    save_base("GPT2LMHeadModel", "GPT2Config")
    Path("chat.jinja").write_text(CHAT)
    answers = [[{"role": "assistant", "content": text}] for text in TEXTS]
    write_lines(Path("data.jsonl"), [{"messages": messages} for messages in answers])
    run = go(f"model=hf model.path=base {DATA} data.chat_template=chat.jinja")
    found = exported(capsys)
    assert "GPT2LMHeadModel" in found["lines"][0], "no class for its task, whose name it lacks"
    assert_is_trained(found, run)
    assert found["tokenizer"].chat_template == CHAT


def test_a_model_of_ours_is_loaded_with_its_tokenizer_of_bytes(capsys):
    run = go(f"model=gpt_tiny model.width=24 {DATA}")
    found = exported(capsys)
    assert isinstance(found["model"], GPT)
    assert found["model"].embedding.weight.equal(state(run)["model.embedding.weight"])
    assert found["tokenizer"]("abc")["input_ids"] == [256, 97, 98, 99, 257]


def test_init_reads_shards_of_a_folder_and_of_the_cache_of_the_hub(monkeypatch):
    save_base("GPT2LMHeadModel", "GPT2Config")
    cached = Path("hub/models--someone--small")
    model = transformers.AutoModelForCausalLM.from_pretrained("base")
    for commit in ("0" * 40, "f" * 40):  # the main branch is the first of them
        model.save_pretrained(cached / "snapshots" / commit, max_shard_size=2000)
        model.transformer.wte.weight.data.zero_()
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0" * 40)
    first = cached / "snapshots" / ("0" * 40)
    assert len([*first.glob("*.safetensors")]) > 1
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(Path("hub").absolute()))
    line = f"model=hf model.config=base {DATA} optimizer.lr=0"
    expected = load_file("base/model.safetensors")["transformer.wte.weight"]
    for init in (first, cached, "someone/small"):
        found = state(go(f"{line} init={init}"))["model.transformer.wte.weight"]
        assert found.equal(expected)
