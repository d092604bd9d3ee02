"""Pairs of answers, a model that learns from them, and their losses as one writes them by hand."""

from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from tests.lib.hf_toys import WORDS, save_llama, save_tokenizer, write_lines

NUM_PAIRS = 10


def words(first: int, count: int) -> str:
    return " ".join(WORDS[(first + 3 * i) % len(WORDS)] for i in range(count))


PAIRS = [
    {
        "prompt": words(i, 2 + i % 5),
        "chosen": f" {words(i + 1, 1 + i % 4)}",
        "rejected": f" {words(i + 5, 2 + i % 7)}",
        "margin": i % 3 / 2,
    }
    for i in range(NUM_PAIRS)
]
"""Ragged: prompts of 2 to 6 words, and answers of 1 to 8."""


def save_pair_files() -> None:
    """Write a model `llama`, and the pairs."""
    save_llama(Path("llama"))
    save_tokenizer(Path("llama"), 300)
    write_lines(Path("pairs.jsonl"), PAIRS)


def batch_of(pairs: list[dict]) -> tuple[Tensor, Tensor, Tensor]:
    """Chosen rows, then rejected ones: ids, what is no padding, and which tokens are answers."""
    tokenizer = transformers.AutoTokenizer.from_pretrained("llama")
    rows, starts = [], []
    for side in ("chosen", "rejected"):
        for pair in pairs:
            starts.append(len(tokenizer(pair["prompt"])["input_ids"]))
            rows.append(tokenizer(f"{pair['prompt']}{pair[side]}</s>")["input_ids"])
    given = tokenizer.pad({"input_ids": rows}, return_tensors="pt")
    ids, mask = given["input_ids"], given["attention_mask"].bool()
    return ids, mask, mask & (torch.arange(ids.shape[1]) >= torch.tensor(starts)[:, None])


def token_logps(model: torch.nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    logits = model(input_ids=ids, attention_mask=mask.long()).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


def pair_losses(name: str, model: torch.nn.Module, before: torch.nn.Module, pairs: list[dict]):
    """The mean over pairs, and for ORPO the cross entropy of chosen tokens beside it."""
    ids, mask, is_answer = batch_of(pairs)
    is_answer = is_answer[:, 1:]
    own = token_logps(model, ids, mask) * is_answer
    lengths = is_answer.sum(1)
    if name == "orpo":
        half = len(pairs)
        chance = (own.sum(1) / lengths).exp()
        odds = (chance / (1 - chance)).log()
        both = -F.logsigmoid(odds[:half] - odds[half:]).mean()
        return -own[:half].sum() / lengths[:half].sum() + 0.1 * both
    with torch.no_grad():
        first = token_logps(before, ids, mask) * is_answer
    ratios = (own - first).sum(1)
    if name == "ipo":
        ratios = ratios / lengths
    gap = ratios[: len(pairs)] - ratios[len(pairs) :]
    losses = {
        "sigmoid": lambda: -F.logsigmoid(0.1 * gap),
        "smooth": lambda: -0.8 * F.logsigmoid(0.1 * gap) - 0.2 * F.logsigmoid(-0.1 * gap),
        "hinge": lambda: torch.relu(1 - 0.1 * gap),
        "ipo": lambda: (gap - 5) ** 2,
    }
    return losses[name]().mean()
