"""Prompts are continued at evaluations as the exported model continues them."""

from pathlib import Path

import pytest
import torch
import transformers

from tests.lib.hf_toys import TEMPLATE, TEXTS, save_llama, save_tokenizer, write_lines
from tests.lib.nightly import nightly
from tests.lib.run_support import entries, go, on, shell, small_library
from trainer.features.hugging_face.chat_encoder import prompt_tokens
from trainer.features.stdlib.stdlib import StdlibText

PROMPTS = ["the step is", "we"]
LINE = (
    "model=hf model.path=model data=hf data.path=texts.jsonl data.max_length=32 batch.global=8 "
    "steps=2 eval.every=1 optimizer.lr=3e-3 log.generate_tokens=8"
)
TYPED = "'log.generate=[the step is,we]'"


def save() -> transformers.PreTrainedTokenizerFast:
    save_llama(Path("model"))
    write_lines(Path("texts.jsonl"), [{"text": text} for text in TEXTS])
    return save_tokenizer(Path("model"))


@pytest.mark.parametrize("mode", ["parallel.ranks=1", nightly("parallel=fsdp parallel.ranks=2")])
def test_a_prompt_is_continued_as_the_exported_model_does(mode, capfd):
    tokenizer = save()
    run = go(f"{LINE} {mode} {TYPED}")
    found = entries(run, "generated.jsonl")
    assert [(e["step"], e["prompt"]) for e in found] == [(s, p) for s in (1, 2) for p in PROMPTS]
    assert shell(f"export run={run.folder} export.to=out") == 0
    model = transformers.AutoModelForCausalLM.from_pretrained("out")
    for entry in found[2:]:
        ids = torch.tensor([tokenizer.encode(entry["prompt"], add_special_tokens=False)])
        whole = model.generate(ids, do_sample=False, max_new_tokens=8)[0].tolist()
        assert entry["text"] == tokenizer.decode(whole[ids.shape[1] :], skip_special_tokens=True)
        assert entry["text"]
    assert f"'we' -> {found[-1]['text']!r}" in capfd.readouterr().out
    assert shell(f"generate run={run.folder} prompt=we generate.tokens=8") == 0
    shown = capfd.readouterr()
    assert shown.out == f"{found[-1]['text']}\n", "with a cache as without"
    assert "reading step 2" in shown.err


@pytest.mark.slow
def test_a_resumed_run_has_each_step_once():
    save()
    run = go(f"{LINE} {TYPED}")
    more = on(run, "steps=4")
    assert [e["step"] for e in entries(more, "generated.jsonl")] == [1, 1, 2, 2, 3, 3, 4, 4]


def test_a_chat_is_asked_by_its_template_and_ends_with_its_turn():
    tokenizer = save()
    tokenizer.chat_template = TEMPLATE
    ids, ends = prompt_tokens(tokenizer, "the step", "chat", {"chat_template": None})
    assert tokenizer.decode(ids) == "<user>the step</s><assistant>"
    assert set(ends) == {tokenizer.eos_token_id}
    turns = TEMPLATE.replace("{{ eos_token }}", "<mask>")
    _, ends = prompt_tokens(tokenizer, "the step", "chat", {"chat_template": turns})
    assert set(ends) == {tokenizer.eos_token_id, tokenizer.mask_token_id}
    ids, _ = prompt_tokens(tokenizer, "the step", "text", {})
    assert tokenizer.decode(ids) == "the step"
    tokenizer.chat_template = None
    ids, _ = prompt_tokens(tokenizer, "the step", "instruction", {})
    assert tokenizer.decode(ids).endswith("### Instruction:\nthe step\n\n### Response:\n")


class Unreadable(StdlibText):
    """Text that no one can decode."""

    def decode(self, ids):
        raise ValueError("no alphabet")


def test_tokens_beyond_the_data_are_not_chosen_and_a_run_survives_its_decoder(capsys, monkeypatch):
    small_library(monkeypatch)
    sizes = "model=gpt_tiny model.width=16 model.num_heads=2 model.num_layers=1"
    line = f"steps=1 {sizes} data=stdlib {TYPED}"
    run = go(f"{line} model.vocab_size=4096 log.generate_tokens=4")
    assert [each["prompt"] for each in entries(run, "generated.jsonl")] == PROMPTS
    target = f"{Unreadable.__module__}.{Unreadable.__qualname__}"
    run = go(f"{line.replace('data=stdlib', '')} data._target_={target} trust=[tests]")
    assert "cannot be decoded: ValueError: no alphabet" in capsys.readouterr().out
    assert run.result["eval_loss"] is not None
    assert not (run.folder / "generated.jsonl").exists()
