"""A tokenizer of one's own is two files; data that name `tokenizer` are given it."""

from pathlib import Path

import pytest

from tests.lib.hf_toys import TEXTS, save_llama, save_tokenizer
from tests.lib.run_support import go, overrides
from trainer.cli.main import run as run_line

pytestmark = pytest.mark.usefixtures("own_folder")

WORDS = f"""
class Words:
    bos_token_id, eos_token_id = 0, 1

    def __init__(self, least=2):
        self.least = least

    def __call__(self, texts, add_special_tokens=True):
        ids = [[self.least + len(word) for word in text.split()] for text in texts]
        return {{"input_ids": ids}}

    def __len__(self):
        return self.least + 20


class Texts:
    def __init__(self, tokenizer):
        self.rows = tokenizer({TEXTS!r}, add_special_tokens=False)["input_ids"]
        self.vocab_size = len(tokenizer)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {{"input_ids": self.rows[i], "labels": self.rows[i]}}
"""
LINE = (
    "model=gpt_tiny model.width=16 model.num_layers=1 model.num_heads=2 steps=1 "
    "data._target_=words.Texts"
)


@pytest.mark.nightly
def test_data_are_given_the_tokenizer_of_the_run(capsys):
    Path("words.py").write_text(WORDS)
    Path("own/tokenizer").mkdir(parents=True)
    Path("own/tokenizer/words.yaml").write_text("# By length.\n_target_: words.Words\nleast: 5\n")
    run_line(["--config-dir=own", *overrides(f"plan {LINE} tokenizer=words")])
    assert "Words, 25 ids" in capsys.readouterr().out
    go(f"command=plan {LINE} tokenizer._target_=words.Words tokenizer.least=3")
    assert "Words, 23 ids" in capsys.readouterr().out


def test_by_default_it_is_that_of_the_model_or_bytes(capsys):
    Path("words.py").write_text(WORDS)
    save_llama(Path("llama"))
    own = save_tokenizer(Path("llama"))
    go("command=plan model=hf model.path=llama steps=1 data._target_=words.Texts")
    assert f"{len(own)} ids" in " ".join(capsys.readouterr().out.split())
    go(f"command=plan {LINE}")
    assert "bytes, 258 ids" in capsys.readouterr().out
