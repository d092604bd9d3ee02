"""What `train export` writes, by the lines of Python that it prints and by its model card."""

import re
import subprocess
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file

from tests.lib.cli_support import python
from tests.lib.heads import Head
from tests.lib.hf_toys import TEXTS, save_tokenizer, write_lines
from tests.lib.run_support import entries, go, shell, state
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


def card(folder: str) -> tuple[dict, str]:
    """Give what a hub reads at the head of a model card, and the rest of it."""
    _, head, text = Path(folder, "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(head), text


def python_of(text: str) -> str:
    """Give the lines of Python of a model card."""
    return re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]


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


MINE = """
from torch import nn

class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.embed, self.head = nn.Embedding(16, width), nn.Linear(width, 16)

    def forward(self, input_ids):
        return self.head(self.embed(input_ids))
"""


def test_a_card_says_what_was_trained_and_its_lines_load_it_in_a_new_process(monkeypatch, capsys):
    Path("mine.py").write_text(MINE)
    for words in ("init -q", "add mine.py", "-c user.name=a -c user.email=a@b commit -qm first"):
        subprocess.run(["git", *words.split()], check=True)
    Path("mine.py").write_text(f"{MINE}\n")
    monkeypatch.syspath_prepend(str(Path.cwd()))
    line = "model._target_=mine.Net model.width=6 checkpoint.every=1 checkpoint.keep=9 steps=2"
    run = go(f"{line} eval.every=1 name=first log.generate=[] 'hooks=[]'")
    capsys.readouterr()
    assert shell(f"""export run={run.folder} trust=[tests,mine] "export.to=my out" step=1""") == 0
    printed = [each[2:] for each in capsys.readouterr().out.splitlines() if each[:2] == "  "]
    head, text = card("my out")
    assert head == {"license": None}
    assert python_of(text).splitlines() == printed
    Path("load.py").write_text("\n".join([*printed, "print(model.head.weight.sum().item())"]))
    done = python("load.py", Path.cwd())
    expected = state(run, 1)["model.head.weight"].sum().item()
    assert float(done.stdout) == pytest.approx(expected), done.stderr
    (loss,) = (e["eval_loss"] for e in entries(run) if "eval_loss" in e and e["step"] == 1)
    for part in (
        "# first\n\nWeights of `mine.Net` (",
        " after step 1 of 2.",
        "| trained on | 42 samples |",
        "| batch | 8 samples behind each step |",
        "| optimizer | adamw, lr 0.012, weight_decay 0.1, ",
        f"| loss | {loss:.4f} |",
        " model._target_=mine.Net model.width=6 ",
        ", with changes in 1 file that are not committed |",
        f"| torch | {torch.__version__} |",
    ):
        assert part in text
    assert str(Path.cwd()) not in text
    go(f"{line} data.holdout=0 hydra.run.dir=bare")
    assert shell("export run=bare trust=[tests,mine] export.to=bare/out") == 0
    assert "Held-out" not in card("bare/out")[1]


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", "export.merge=true"])
def test_an_adapter_and_a_merged_model_are_loaded_by_their_cards_in_a_new_process(more):
    save_base("LlamaForCausalLM", "LlamaConfig")
    Path("base/README.md").write_text("theirs")
    run = go(f"model=hf model.path=base adapter=lora {DATA}")
    assert shell(f"export run={run.folder} export.to=out {more}") == 0
    assert Path("base/README.md").read_text() == "theirs"
    head, text = card("out")
    library = "transformers" if more else "peft"
    expected = {"license": None, "library_name": library, "pipeline_tag": "text-generation"}
    assert head == expected, "a folder is no name on the hub"
    assert "| base | `base` |" in text
    assert "model.path=base data.path=data.jsonl" in text
    Path("load.py").write_text(f"{python_of(text)}print(model.config.vocab_size, len(tokenizer))")
    assert python("load.py", Path.cwd(), HF_HUB_OFFLINE="1").stdout == "300 300\n"


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
