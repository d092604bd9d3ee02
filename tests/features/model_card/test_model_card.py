"""The model card of an export: what it says, and that its lines load the weights."""

import re
import subprocess
from pathlib import Path

import pytest
import torch
import yaml

from tests.lib.cli_support import python
from tests.lib.hf_toys import TEXTS, save_llama, save_tokenizer, write_lines
from tests.lib.run_support import entries, go, shell, state

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def card(folder: str) -> tuple[dict, str]:
    """Give what a hub reads at the head of a model card, and the rest of it."""
    _, head, text = Path(folder, "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(head), text


def python_of(text: str) -> str:
    """Give the lines of Python of a model card."""
    return re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]


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
    save_llama(Path("base"), 300)
    save_tokenizer(Path("base"))
    Path("base/README.md").write_text("theirs")
    write_lines(Path("data.jsonl"), [{"text": text} for text in TEXTS])
    run = go("model=hf model.path=base adapter=lora data=hf data.path=data.jsonl steps=1")
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
