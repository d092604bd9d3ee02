"""`data.show` under plan: samples as the model gets them, with what is learned in brackets."""

import re
from pathlib import Path

import pytest

from tests.lib.run_support import TOYS, go, read_json

MINE = '''
import torch
from torch import nn

WORDS = "the step is exact and the sum too".split()


class Net(nn.Module):
    def __init__(self, task="causal_lm", classes=8):
        super().__init__()
        self.task, self.table, self.head = task, nn.Embedding(8, 4), nn.Linear(4, classes)

    def forward(self, input_ids):
        hidden = self.table(input_ids)
        return self.head(hidden.mean(1) if self.task == "sequence_classification" else hidden)


class Words:
    """Eight words; learned are `kind`: the last five, a class, or a class of every second one."""

    def __init__(self, kind="words", named=True):
        self.kind = kind
        if named and kind != "words":
            self.label_names = ["low", "high"]

    def decode(self, ids):
        return " ".join(WORDS[i] for i in ids)

    def __len__(self):
        return 16

    def __getitem__(self, i):
        ids = torch.arange(8)
        if self.kind == "class":
            return {"input_ids": ids, "labels": 1}
        if self.kind == "tags":
            return {"input_ids": ids, "labels": torch.where(ids % 2 == 0, ids // 4, -100)}
        return {"input_ids": ids, "labels": torch.where(ids > 2, ids, -100)}


class Plain(Words):
    decode = property()  # as a data set that has none
'''


def shown(line: str) -> list[str]:
    Path("showing.py").write_text(MINE)
    run = go(f"command=plan data.show=2 data.holdout=0 {line}")
    first, second = read_json(run.folder / "plan.json")["shown_samples"]
    assert first["id"] != second["id"]
    return [first["text"], second["text"]]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("", "the step is[[ exact and the sum too]]"),
        (
            "data.kind=tags model.task=token_classification model.classes=2",
            "[[the=low]] step[[ is=low]] exact[[ and=high]] the[[ sum=high]] too",
        ),
        (
            "data.kind=class model.task=sequence_classification model.classes=2",
            "the step is exact and the sum too -> [[high]]",
        ),
        (
            "data.kind=class data.named=false model.task=sequence_classification",
            "the step is exact and the sum too -> [[1]]",
        ),
        ("data._target_=showing.Plain", "0 1 2 [[3 4 5 6 7 ]]"),
    ],
)
def test_samples_are_decoded_with_what_is_learned_in_brackets(line, text):
    assert shown(f"data._target_=showing.Words model._target_=showing.Net {line}") == [text] * 2


def test_a_picture_is_shown_by_its_size_and_class():
    texts = shown(f"data._target_={TOYS}.Images model._target_={TOYS}.Vision")
    assert all(re.fullmatch(r"pixels \(3, 6, 6\) -> \[\[[0-3]\]\]", text) for text in texts)


def test_bytes_are_shown_as_text_on_the_screen(capsys):
    Path("notes.txt").write_text("Größe\x1b[31m\n\n" * 2)
    line = "data=text data.path=notes.txt model=gpt_tiny batch.global=2"
    assert shown(line) == ["<|bos|>[[Größe\\x1b[31m<|eos|>]]"] * 2
    assert "<|bos|>[[Größe\\x1b[31m<|eos|>]]" in capsys.readouterr().out
