"""Pairs of answers, a model that learns from them, and their losses as one writes them by hand.

`python -m tests.lib.preference_toys FOLDER` writes what TRL is compared on.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from tests.lib.hf_toys import WORDS, save_llama, save_tokenizer, write_lines
from tests.lib.run_support import state
from trainer.cli.python_api import FinishedRun

NUM_PAIRS = 10
ONE_STEP = (
    "model=hf data=hf data.path=pairs.jsonl data.holdout=0 scheduler=constant clip_norm=null "
    f"batch.global={NUM_PAIRS} optimizer=sgd optimizer.lr=1 optimizer.momentum=0"
)
"""What is typed for steps of all pairs that a plain loop takes, too."""
EXACT, WRONG = 1e-10, 1e-4
"""Errors of a step that is the same in float64, and of another one."""


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


def save_fixed_files(folder: Path) -> None:
    """Write a model `model` whose weights and tokens are the same everywhere, and the pairs."""
    save_llama(folder / "model", 260, max_position_embeddings=256)
    save_tokenizer(folder / "model", 260)  # bytes alone: no merges, and the four special tokens
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    with torch.no_grad():
        for i, (_, weight) in enumerate(sorted(model.named_parameters()), start=1):
            waves = torch.sin(i * torch.arange(weight.numel(), dtype=torch.float64))
            weight.copy_(0.3 * waves.view(weight.shape) + (weight.dim() == 1))
    model.save_pretrained(folder / "model")
    write_lines(folder / "pairs.jsonl", PAIRS)


def error(run: FinishedRun, expected: dict[str, Tensor]) -> float:
    """How far the weights of a run are from those of a model of transformers, by the largest."""
    found = {name.rpartition("model.")[2]: weight for name, weight in state(run).items()}
    largest = max(float(each.abs().max()) for each in expected.values())
    gaps = (found[name.rpartition("model.")[2]] - each for name, each in expected.items())
    return max(float(gap.abs().max()) for gap in gaps) / largest


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


if __name__ == "__main__":
    save_fixed_files(Path(sys.argv[1]))
