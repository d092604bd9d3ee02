"""Tokens that a user adds: each is one id, with a row that is learnt, saved and exported."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lib.hf_toys import TEXTS, save_llama, save_tokenizer, write_lines
from tests.lib.nightly import slow
from trainer import train
from trainer.cli.python_api import FinishedRun


@pytest.fixture(autouse=True)
def _files(own_folder: Path) -> None:
    save_tokenizer(Path("llama"))
    write_lines(Path("corpus.jsonl"), [{"text": f"<tool> {text}</tool>"} for text in TEXTS])


def tokenizer_in(folder: str | Path) -> Any:
    from transformers import AutoTokenizer  # noqa: PLC0415

    return AutoTokenizer.from_pretrained(folder)


def go(*more: str, model: str = "llama") -> FinishedRun:
    line = f"model=hf model.path={model} data=hf data.path=corpus.jsonl batch.global=8 steps=1"
    line += " accum=fixed accum.micro=4 logger=[] eval.every=null device=cpu precision=fp32"
    return train([*line.split(), *more])


def model_of(folder: str | Path) -> Any:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("tied", [False, slow(True)])
def test_new_rows_begin_as_the_mean_of_the_old_ones_and_an_export_loads_with_them(tied):
    old = len(tokenizer_in("llama"))
    save_llama(Path("llama"), old, tie_word_embeddings=tied)
    before = model_of("llama").get_input_embeddings().weight
    run = go("tokenizer.add=[<tool>,</tool>,a]", "optimizer.lr=0")
    assert "tokenizer.add: a: in the tokenizer already" in (run.folder / "train.log").read_text()
    train(["export", f"run={run.folder}", "export.to=out"])
    model, tokenizer = model_of("out"), tokenizer_in("out")
    for part in (model.get_input_embeddings(), model.get_output_embeddings()):
        assert part.weight.shape[0] == model.config.vocab_size == len(tokenizer) == old + 2
    weight = model.get_input_embeddings().weight
    assert weight[:old].equal(before)
    torch.testing.assert_close(weight[old:], before.mean(0, keepdim=True).expand(2, -1))
    whole = tokenizer("<tool> the</tool>", add_special_tokens=False).input_ids
    assert [whole[0], whole[-1]] == [old, old + 1]
    assert tokenizer.decode(whole, skip_special_tokens=True) == "<tool> the</tool>"


def test_a_run_with_them_learns_their_rows_and_goes_on():
    old = len(tokenizer_in("llama"))
    save_llama(Path("llama"), old)
    run = go("tokenizer.add=[<tool>,</tool>]", "optimizer.lr=0.1")
    again = train([f"resume={run.folder}", "steps=2"])
    train(["export", f"run={again.folder}", "export.to=out"])
    first, second = model_of("out").get_input_embeddings().weight[old:]
    assert not torch.allclose(first, second)
    train(["generate", f"run={again.folder}", "prompt=<tool> the", "generate.tokens=2"])


def test_a_padded_table_has_free_rows_for_them():
    old = len(tokenizer_in("llama"))
    save_llama(Path("llama"), old + 8)
    before = model_of("llama").get_output_embeddings().weight
    run = go("tokenizer.add=[<tool>,</tool>]", "optimizer.lr=0")
    train(["export", f"run={run.folder}", "export.to=out"])
    after = model_of("out").get_output_embeddings().weight
    assert after.shape == before.shape
    torch.testing.assert_close(after[old], before[:old].mean(0))
    assert after[old + 2 :].equal(before[old + 2 :])


def test_rows_that_an_adapter_freezes_are_warned_of_with_what_trains_them():
    old = len(tokenizer_in("llama"))
    save_llama(Path("llama"), old)
    words = ["tokenizer.add=[<tool>,</tool>]", "adapter=lora"]
    run = go(*words)
    text = " ".join((run.folder / "train.log").read_text().split())
    assert "type adapter.modules_to_save=[embed_tokens,lm_head], or adapter.trainable_" in text
    run = go(*words, "adapter.modules_to_save=[embed_tokens,lm_head]")
    assert "are frozen" not in (run.folder / "train.log").read_text()
