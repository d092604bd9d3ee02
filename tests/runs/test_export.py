"""What `train export` writes of a model of transformers, by the lines of Python that it prints."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.lib.heads import Head
from tests.lib.hf_toys import TEXTS, save_tokenizer, write_lines
from tests.lib.nightly import nightly
from tests.lib.run_support import go, shell, state
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


def exported(capsys, to: str = "out", run: Path | str = "auto") -> dict:
    """Export a run, by default the newest, and run the lines that it prints."""
    capsys.readouterr()
    assert shell(f"export run={run} export.to={to} 'trust=[datasets]'") == 0
    lines = [line[2:] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    names: dict = {}
    exec("\n".join(lines), names)
    return names | {"lines": lines}


def records(kind: str) -> str:
    """Write records of a kind, and give the settings that read them."""
    makes = {
        "messages": lambda i, t: {"messages": [{"role": "assistant", "content": t}]},
        "label": lambda i, t: {"text": t, "label": ("bad", "good", "fair")[i % 3]},
        "tags": lambda i, t: {"tokens": t.split(), "tags": ["O"] * len(t.split())},
        "text": lambda i, t: {"text": t},
        "pairs": lambda i, t: {"source": t, "target": t[::-1]},
        "choices": lambda i, t: {"question": t, "choices": [t, "a", "b"], "answer": i % 3},
        "spans": lambda i, t: {
            "question": t,
            "context": t,
            "answers": {"text": [t.split()[0]], "answer_start": [0]},
        },
    }
    write_lines(Path("data.jsonl"), [makes[kind](i, t) for i, t in enumerate(TEXTS)])
    return "data=hf data.path=data.jsonl"


@pytest.mark.parametrize(
    ("name", "config", "task", "kind", "loader"),
    [
        nightly("GPT2LMHeadModel", "GPT2Config", "causal_lm", "messages", "GPT2LMHeadModel"),
        ("BertModel", "BertConfig", "sequence_classification", "label", "SequenceClassification"),
        nightly("BertModel", "BertConfig", "token_classification", "tags", "TokenClassification"),
        nightly("BertForMaskedLM", "BertConfig", "masked_lm", "text", "MaskedLM"),
        nightly("BertModel", "BertConfig", "question_answering", "spans", "QuestionAnswering"),
        nightly("BertModel", "BertConfig", "multiple_choice", "choices", "MultipleChoice"),
        nightly("T5ForConditionalGeneration", "T5Config", "seq2seq_lm", "pairs", "T5"),
        nightly("LlamaForCausalLM", "LlamaConfig", "causal_lm", "messages", "CausalLM"),
    ],
)
def test_every_kind_of_head_is_loaded_with_equal_logits_and_ids(
    name, config, task, kind, loader, capsys
):
    save_base(name, config, num_labels=2 if kind == "spans" else 3)
    Path("chat.jinja").write_text(CHAT)
    chat = " data.chat_template=chat.jinja" if kind == "messages" else ""
    run = go(f"model=hf model.path=base model.task={task} {records(kind)}{chat} steps=1")
    found = exported(capsys)
    assert loader in found["lines"][0]
    model, tokenizer = found["model"].eval(), found["tokenizer"]
    trained = {n.removeprefix("model."): t for n, t in state(run).items() if n.startswith("model.")}
    expected = type(model)._from_config(model.config)
    expected.load_state_dict(trained, strict=False)
    ids = tokenizer(WORDS, return_tensors="pt")["input_ids"] % 300
    fields = {"input_ids": ids[:, None] if task == "multiple_choice" else ids}
    if task == "seq2seq_lm":
        fields["decoder_input_ids"] = ids
    for parameter in model.parameters():  # off the file's own memory, whose alignment is any
        parameter.data = parameter.data.clone()
    with torch.no_grad():
        mine, theirs = (each(**fields) for each in (model, expected.eval()))
    head = "start_logits" if task == "question_answering" else "logits"
    assert torch.equal(mine[head], theirs[head])
    base = transformers.AutoTokenizer.from_pretrained("base")
    assert tokenizer(WORDS)["input_ids"] == base(WORDS)["input_ids"]
    assert tokenizer.chat_template == (CHAT if chat else None)
    if kind == "label":
        assert model.config.id2label == {0: "bad", 1: "fair", 2: "good"}
        assert model.config.label2id == {"bad": 0, "fair": 1, "good": 2}


def test_a_model_of_ours_is_loaded_with_its_tokenizer_of_bytes(capsys):
    run = go(f"model=gpt_tiny model.width=24 {records('text')} steps=1")
    found = exported(capsys)
    assert isinstance(found["model"], GPT)
    assert found["model"].embedding.weight.equal(state(run)["model.embedding.weight"])
    assert found["tokenizer"]("abc")["input_ids"] == [256, 97, 98, 99, 257]


def test_init_reads_shards_of_a_folder_and_of_the_cache_of_the_hub(monkeypatch):
    save_base("GPT2LMHeadModel", "GPT2Config")
    cached = Path("hub/models--someone--small")
    config = transformers.AutoConfig.from_pretrained("base")
    model = transformers.AutoModelForCausalLM.from_pretrained("base")
    for commit in ("0" * 40, "f" * 40):  # the main branch is the first of them
        model.save_pretrained(cached / "snapshots" / commit, max_shard_size=2000)
        model.transformer.wte.weight.data.zero_()
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0" * 40)
    first = cached / "snapshots" / ("0" * 40)
    assert len([*first.glob("*.safetensors")]) > 1
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(Path("hub").absolute()))
    line = f"model=hf model.config=base {records('text')} steps=1 optimizer.lr=0"
    expected = load_file("base/model.safetensors")["transformer.wte.weight"]
    for init in (first, cached, "someone/small"):
        found = state(go(f"{line} init={init}"))["model.transformer.wte.weight"]
        assert found.equal(expected)
    assert json.loads(Path("base/config.json").read_text())["vocab_size"] == config.vocab_size
