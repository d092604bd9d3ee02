"""Jobs of Hugging Face as they are typed: a model's folder and a file of records."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lib.hf_toys import TEXTS, save_llama, save_tokenizer, write_lines
from tests.lib.run_support import go

pytestmark = [
    pytest.mark.usefixtures("own_folder"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def llama() -> Path:
    """A causal model with its tokenizer."""
    save_llama(Path("llama"))
    save_tokenizer(Path("llama"), chat_template=TEMPLATE)
    return Path("llama")


def test_text_and_conversations_are_typed_without_an_objective(llama, capsys):
    write_lines(Path("corpus.jsonl"), [{"text": text} for text in TEXTS])
    line = f"model=hf model.path={llama} data=hf batch.global=32 steps=2"
    go(f"{line} data.path=corpus.jsonl")
    shown = " ".join(capsys.readouterr().out.split())
    assert "hf: 57 samples" in shown
    assert "text (text)" in shown
    assert "next_token, as LlamaForCausalLM is made for causal_lm" in shown
    turns = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": text}]}
        for text in [*TEXTS, "batch " * 70]
    ]
    write_lines(Path("chat.jsonl"), turns)
    go(f"{line} data.path=chat.jsonl")
    shown = " ".join(capsys.readouterr().out.split())
    # The model has 64 positions.
    assert "chat (messages), 1 longer than data.max_length left out" in shown
