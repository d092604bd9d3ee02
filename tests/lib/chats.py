"""Conversations, chat templates, and a small tokenizer for them."""

import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import transformers
from tokenizers import processors

from tests.lib.hf_toys import train_bpe, write_lines
from trainer.features.hugging_face.data_set import HuggingFaceData

USER = {"role": "user", "content": "why?"}
FIRST, LAST = ({"role": "assistant", "content": text} for text in ("because it is", "so"))
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
GENERATION = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}"
    "{%- if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}"
    "{% endgeneration %}{{ '\\n' }}{%- else %}{{- m.content + '<|im_end|>\\n' }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + "
    "'<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
# The system's message goes into the first of the user, and an answer has no header.
MISTRAL = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content + "
    "'\\n\\n' %}{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages "
    "%}{% endif %}{% for m in rest %}{% if m.role == 'user' %}{{ '[INST] ' + (system if loop.first "
    "else '') + m.content + ' [/INST]' }}{% elif m.role == 'assistant' %}"
    "{{ ' ' + m.content + eos_token }}{% else %}{{ raise_exception('no such role here') }}"
    "{% endif %}{% endfor %}"
)
# As Qwen3's: what was thought is shown of the last answer alone.
THOUGHTS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' and "
    "loop.last %}{{ '<think>\\n' + (m.thought or '') + '\\n</think>\\n\\n' }}{% endif %}"
    "{{ m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

Piece = tuple[str, bool]
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>"]
SPECIAL += ["<|eot_id|>"]
WORDS = """
step batch gradient the a of exactly naïve über 東京 café 3.14 x=1 loss sum, mean; weight why?
because (see) [note] it's don't is are was it we you count token
"""


def conversations(count: int = 200, seed: int = 0) -> list[list[dict[str, str]]]:
    """Conversations of one to four answers, every third with a message of the system."""
    draw = random.Random(seed)
    return [_conversation(draw, has_system=i % 3 == 0) for i in range(count)]


def _conversation(draw: random.Random, *, has_system: bool) -> list[dict[str, str]]:
    system = [{"role": "system", "content": _text(draw)}] if has_system else []
    turns = [
        {"role": role, "content": _text(draw)}
        for _ in range(draw.randint(1, 4))
        for role in ("user", "assistant")
    ]
    return system + turns


def _text(draw: random.Random) -> str:
    """One to three lines of words."""
    lines = range(draw.randint(1, 3))
    return "\n".join(" ".join(draw.choices(WORDS.split(), k=draw.randint(1, 12))) for _ in lines)


def chat_tokenizer(template: str | None = CHATML) -> transformers.PreTrainedTokenizerFast:
    """A byte-level BPE of 400 ids that puts a BOS before a text of its own accord."""
    texts = (message["content"] for messages in conversations(50, 1) for message in messages)
    bpe = train_bpe(400, SPECIAL, texts)
    bpe.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bpe.token_to_id("<s>"))]
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    tokenizer.chat_template = template
    return tokenizer


def chatml_pieces(messages: Iterable[dict[str, str]]) -> list[Piece]:
    """Write out what ChatML makes of a conversation, each piece with whether it is learned."""
    pieces: list[Piece] = []
    for m in messages:
        learned = m["role"] == "assistant"
        pieces += [(f"<|im_start|>{m['role']}\n", False), (f"{m['content']}<|im_end|>", learned)]
        pieces += [("\n", False)]
    return pieces


def llama3_pieces(messages: Iterable[dict[str, str]]) -> list[Piece]:
    pieces: list[Piece] = [("<s>", False)]
    for m in messages:
        header = f"<|start_header_id|>{m['role']}<|end_header_id|>\n\n"
        pieces += [(header, False), (f"{m['content']}<|eot_id|>", m["role"] == "assistant")]
    return pieces


def mistral_pieces(messages: Iterable[dict[str, str]]) -> list[Piece]:
    pieces, system = [("<s>", False)], ""
    for m in messages:
        if m["role"] == "system":
            system = m["content"] + "\n\n"
        elif m["role"] == "user":
            pieces += [(f"[INST] {system}{m['content']} [/INST]", False)]
            system = ""
        else:
            pieces += [(f" {m['content']}</s>", True)]
    return pieces


PIECES: dict[str, tuple[str, Callable[[Iterable[dict[str, str]]], list[Piece]]]] = {
    "chatml": (CHATML, chatml_pieces),
    "generation": (GENERATION, chatml_pieces),
    "llama3": (LLAMA3, llama3_pieces),
    "mistral": (MISTRAL, mistral_pieces),
}
"""Templates, each with what it makes of a conversation written by hand."""


def marked(
    tokenizer: transformers.PreTrainedTokenizerFast, ids: list[int], counts: list[bool]
) -> str:
    """Decode ids, with brackets around runs of loss terms: independent of the merges."""
    text, begin = "", 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or counts[end] != counts[begin]:
            run = tokenizer.decode(ids[begin:end], clean_up_tokenization_spaces=False)
            text += f"⟦{run}⟧" if counts[begin] else run
            begin = end
    return text


def opened(folder: Path, records: Any, template: str | None = CHATML, **more: Any) -> Any:
    """Open a file of one record, or of a list of them."""
    listed = records if isinstance(records, list) else [records]
    file = write_lines(folder / "records.jsonl", listed)
    return HuggingFaceData(str(file), chat_tokenizer(template), holdout=0.0, **more)
