"""Translate what people type who know other trainers, or another grammar.

Words only; whether a key or a value is valid is for others to say.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from trainer.config.messages import clip, did_you_mean

SYNONYMS: Mapping[str, str] = {
    **dict.fromkeys(("batch_size", "bs", "global_batch_size"), "batch.global"),
    **dict.fromkeys(("accumulate_grad_batches", "gradient_accumulation_steps"), "accum.steps"),
    **dict.fromkeys(("gradient_clip_val", "grad_clip", "max_grad_norm"), "clip_norm"),
    **dict.fromkeys(("learning_rate", "lr"), "optimizer.lr"),
    **dict.fromkeys(("max_epochs", "num_epochs", "num_train_epochs"), "epochs"),
    **dict.fromkeys(("weight_decay", "wd"), "optimizer.weight_decay"),
    "max_steps": "steps",
    "micro_batch_size": "accum.micro",
    "warmup_steps": "scheduler.warmup",
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
    """Name the value that is meant, or say that it is not offered; empty where nobody knows.

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


def spaced(words: Sequence[str]) -> str | None:
    """Find a key, its `=` and its value typed apart, as in `batch.global = 64`; one fault or None.

    Args:
        words: of the command line, as the shell parted them.
    """
    for before, word, after in zip(["", *words], words, [*words[1:], ""], strict=False):
        key, equals, value = word.partition("=")
        key, value = key or before, value or after
        is_apart = equals and (word.startswith("=") or word.endswith("="))
        if is_apart and all(w and "=" not in w and w[0] not in "-~" for w in (key, value)):
            return clip(f"{key}: no spaces around =: {key}={value}")
    return None
