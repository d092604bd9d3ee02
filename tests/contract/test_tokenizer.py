"""A tokenizer of one's own is two files; data that name `tokenizer` are given it."""

from pathlib import Path

import pytest

from tests.lib.hf_toys import TEXTS, save_llama, save_tokenizer
from tests.lib.run_support import go

CODE = f"""
class Words:
    def __init__(self, least=2):
        self.least = least

    def __len__(self):
        return self.least + 20

    def __call__(self, texts, **settings):
        return {{"input_ids": [[self.least + len(w) for w in text.split()] for text in texts]}}


class Texts(list):
    def __init__(self, tokenizer):
        rows = tokenizer({TEXTS!r}, add_special_tokens=False)["input_ids"]
        super().__init__({{"input_ids": row, "labels": row}} for row in rows)
        self.vocab_size = len(tokenizer)
"""
GPT = "model=gpt_tiny model.width=16 model.num_layers=1 model.num_heads=2"


@pytest.mark.usefixtures("own_folder")
def test_data_are_given_the_tokenizer_that_is_typed_or_that_of_the_model_or_bytes(capsys):
    Path("words.py").write_text(CODE)
    Path("own/tokenizer").mkdir(parents=True)
    Path("own/tokenizer/words.yaml").write_text("_target_: words.Words\nleast: 5\n")
    save_llama(Path("llama"))
    own = save_tokenizer(Path("llama"))
    for typed, shown in {
        "model=hf model.path=llama": f"{len(own)} ids",
        GPT: "bytes, 258 ids",
        f"{GPT} tokenizer=words": "Words, 25 ids",
        f"{GPT} tokenizer._target_=words.Words tokenizer.least=3": "Words, 23 ids",
    }.items():
        go(f"command=plan data._target_=words.Texts {typed}", config_dir="own")
        assert shown in " ".join(capsys.readouterr().out.split())
