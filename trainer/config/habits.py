"""What people type who know other trainers, or another grammar, and what they mean by it.

Words only; whether a key or a value is valid is for others to say.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from trainer.config.messages import clip, did_you_mean

SYNONYMS: Mapping[str, str] = {
    "accumulate_grad_batches": "accum.steps",
    "batch_size": "batch.global",
    "bs": "batch.global",
    "global_batch_size": "batch.global",
    "gradient_accumulation_steps": "accum.steps",
    "gradient_clip_val": "clip_norm",
    "grad_clip": "clip_norm",
    "learning_rate": "optimizer.lr",
    "lr": "optimizer.lr",
    "max_epochs": "epochs",
    "max_grad_norm": "clip_norm",
    "max_steps": "steps",
    "micro_batch_size": "accum.micro",
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "warmup_steps": "scheduler.warmup",
    "wd": "optimizer.weight_decay",
    "weight_decay": "optimizer.weight_decay",
}
"""What other trainers call a key, by its last part."""

_WORDS: Mapping[str, Mapping[str, str]] = {
    "device": dict.fromkeys(("gpu", "nvidia"), "cuda"),
    "precision": {
        **dict.fromkeys(("32", "float32", "single", "32-true"), "fp32"),
        **dict.fromkeys(("bfloat16", "bf16-mixed", "amp"), "bf16"),
    },
    "wandb.mode": dict.fromkeys(("off", "false", "False", "none", "no"), "disabled"),
}
"""What other trainers call a value, by key."""

_NOT_OFFERED: Mapping[str, Sequence[str]] = {
    "precision": ("fp16", "float16", "half", "16", "16-mixed", "16-true", "fp8", "fp64", "float64")
}
"""Values that others offer and nothing here stands for."""


def hint(key: str, value: object, choices: Collection[str]) -> str:
    """Say what is meant by a value, or that it is not to be had; empty where nobody knows.

    Args:
        key: whose value it is.
        value: as typed; not valid.
        choices: the words that are.
    """
    word = value if isinstance(value, str) else str(value)
    if word in _NOT_OFFERED.get(key, ()):
        return f"; {word} is not offered"
    if key == "hooks" and "." in word:
        return f". Did you mean hooks=[{word}]?"
    meant = _WORDS.get(key, {}).get(word)
    if meant is not None:
        return f". Did you mean {meant}?"
    near = did_you_mean(word, choices) if isinstance(value, str) else ""
    return near and f".{near}"


def key_of(flag: str) -> str | None:
    """Name the key that a flag of another trainer stands for: `batch-size` is `batch.global`."""
    return SYNONYMS.get(flag.lstrip("-").replace("-", "_").lower())


def unquoted(line: str) -> str | None:
    """Take the second pair of quotes off an override; None where there is none."""
    is_quoted = len(line) > 1 and line[0] == line[-1] and line[0] in "\"'`"
    return line[1:-1] if is_quoted and "=" in line else None


def spaced(words: Sequence[str]) -> str | None:
    """Find a key, its `=` and its value written apart: `batch.global = 64`.

    Args:
        words: of the command line, as the shell parted them.

    Returns:
        One fault, or None.
    """
    for place, word in enumerate(words):
        before, after = words[place - 1] if place else "", [*words[place + 1 :], ""][0]
        key, _, value = word.partition("=")
        if word == "=":
            key, value = before, after
        elif word.startswith("="):
            key = before
        elif word.endswith("=") and _is_bare(after):
            value = after
        else:
            continue
        if _is_bare(key) and _is_bare(value):
            return clip(f"{key}: no spaces around =: {key}={value}")
    return None


def _is_bare(word: str) -> bool:
    return bool(word) and "=" not in word and not word.startswith(("-", "~"))
