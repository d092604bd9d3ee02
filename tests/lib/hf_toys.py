"""Small models and tokenizers of Hugging Face, made where a test runs."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SENTENCE = "the a of step sums batch is what we find and cheapest loss weight rank"
WORDS = SENTENCE.split()
TEXTS = [" ".join(WORDS[(7 * i + j * j) % len(WORDS)] for j in range(3 + i % 9)) for i in range(60)]
"""Sixty texts of 3 to 11 words."""


def train_bpe(num_ids: int, special: list[str], texts: Iterable[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: PLC0415

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    how = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=num_ids, special_tokens=special, **how)
    bpe.train_from_iterator(texts, trainer)
    return bpe


def save_tokenizer(
    folder: Path, num_ids: int = 300, texts: Iterable[str] = TEXTS, **options: Any
) -> Any:
    """Train a tokenizer on texts and write it; ids 0 to 3: begin, end, pad, mask."""
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    special |= {"mask_token": "<mask>"}
    bpe = train_bpe(num_ids, [*special.values()], texts)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, **special | options)
    tokenizer.save_pretrained(folder)
    return tokenizer


def save_llama(folder: Path, num_ids: int = 320, **settings: Any) -> None:
    """Write a Llama of one layer with random weights."""
    import torch  # noqa: PLC0415
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "max_position_embeddings": 64, "vocab_size": num_ids}
    LlamaForCausalLM(LlamaConfig(**sizes | settings)).save_pretrained(folder)


def write_lines(file: Path, records: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def entity_tag(word: str) -> str:
    """Tag a word by its length."""
    return ("B-PER", "O", "O")[len(word) % 3]


def save_job_files(*models: str) -> None:
    """Write, in the current folder, files for every job of text, and the models llama, bert, t5."""
    import torch  # noqa: PLC0415
    import transformers  # noqa: PLC0415

    small = {"vocab_size": 320, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    small |= {"num_attention_heads": 2, "max_position_embeddings": 64, "pad_token_id": 2}
    sizes = {"vocab_size": 320, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1}
    sizes |= {"num_heads": 2, "pad_token_id": 2, "eos_token_id": 1, "decoder_start_token_id": 2}
    torch.manual_seed(0)
    makes: dict[str, Any] = {  # each imports a second's worth of transformers
        "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**small)),
        "t5": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)),
    }
    for name in models or (*makes, "llama"):
        if name == "llama":
            save_llama(Path(name))
        else:
            makes[name]().save_pretrained(name)
        save_tokenizer(Path(name), chat_template=TEMPLATE)
    answers = [{"role": "assistant", "content": text} for text in TEXTS]
    files: dict[str, list[dict[str, Any]]] = {
        "corpus": [{"text": text} for text in TEXTS],
        "chat": [{"messages": [{"role": "user", "content": "a"}, each]} for each in answers],
        "pairs": [{"prompt": "find", "completion": f" {text}"} for text in TEXTS],
        "summaries": [{"document": text, "summary": text.split()[0]} for text in TEXTS],
        "ner": [{"tokens": t.split(), "tags": [len(w) % 3 for w in t.split()]} for t in TEXTS],
        "conll": [{"tokens": t.split(), "tags": [*map(entity_tag, t.split())]} for t in TEXTS],
        "squad": [
            {
                "question": "what?",
                "context": text,
                "answers": {"text": [text.split()[1]], "answer_start": [len(text.split()[0]) + 1]},
            }
            for text in TEXTS
        ],
    }
    for name, records in files.items():
        write_lines(Path(f"{name}.jsonl"), records)
    rows = "".join(f"{text},{('good', 'bad')[len(text) % 2]}\n" for text in TEXTS)
    Path("reviews.csv").write_text(f"text,label\n{rows}")
    mails = [f"{text},{('ham', 'spam')[i % 3 == 0]},{i % 4 / 2}" for i, text in enumerate(TEXTS)]
    Path("mails.csv").write_text("\n".join(["text,label,weight", *mails, ""]))
