"""Check what the arguments of the built-in classes must have in common; others check their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from trainer.config.components import ARGUMENTS, GPT, SGD, SHARED, TOKENS, WSD
from trainer.config.durations import warmup_steps
from trainer.config.habits import hint
from trainer.config.messages import clip, did_you_mean, either, line, show
from trainer.config.types import convert, literals_of, words_of

MOST_HEADS = 1024
"""Among so many a number of heads that fits is looked for, however large the width."""

GROUP_SETTINGS: Mapping[str, Any] = {**SHARED["optimizer"], "frozen": bool}
"""Types of what `optimizer.groups` may give to the parameters that a pattern names."""

Tree = Mapping[str, Any]


def value_fault(key: str, annotation: object, value: object, example: object = None) -> str:
    """Say what a value must be, with an example and the nearest word, where there are any."""
    words = list(dict.fromkeys(words_of(annotation)))
    choices = literals_of(annotation)
    is_word = isinstance(example, bool) or example in (None, [], *choices)
    has_example = not is_word and "e.g." not in either(words)
    instance = f", e.g. {show(example)}" if has_example else ""
    return line(key, value, f"must be {either(words)}{instance}{hint(key, value, choices)}")


def argument_faults(tree: Tree) -> Iterator[str]:
    """Name what arguments of the built-in classes contradict each other, or the run.

    Yields:
        One line per fault.
    """
    yield from _model(tree)
    optimizer = tree["optimizer"]
    is_nesterov = optimizer.get("_target_") == SGD and optimizer.get("nesterov") is True
    if is_nesterov and not optimizer.get("momentum"):
        yield line("optimizer.nesterov", True, "needs a momentum; type optimizer.momentum=0.9")
    groups = optimizer.get("groups")
    if not isinstance(groups, Mapping | None):
        yield line("optimizer.groups", groups, "must be a mapping, e.g. {embed*: {lr: 1e-3}}")
    for pattern, settings in groups.items() if isinstance(groups, Mapping) else ():
        yield from map(clip, group_faults(pattern, settings))
    yield from _scheduler(tree)


def _model(tree: Tree) -> Iterator[str]:
    """Check the shape of the transformer, and that its vocabulary is known.

    Yields:
        One line per fault.
    """
    model, data = tree["model"], tree["data"]
    if model.get("_target_") != GPT:
        return
    width, num_heads = model.get("width"), model.get("num_heads")
    if type(width) is type(num_heads) is int and width > 0 < num_heads:
        is_rotary = model.get("positions") == "rotary"
        yield from map(clip, filter(None, [heads_fault(width, num_heads, is_rotary=is_rotary)]))
    is_known = data.get("_target_") != TOKENS or data.get("vocab_size") is not None
    if model.get("vocab_size") is None and not is_known:
        yield (
            "model.vocab_size: token files do not say how many different tokens they hold; type "
            "it, e.g. model.vocab_size=50257"
        )


def heads_fault(width: int, num_heads: int, *, is_rotary: bool) -> str | None:
    """Say why a width cannot be shared by so many heads, and name the nearest sizes that can.

    Args:
        width: channels.
        num_heads: attention heads.
        is_rotary: rotary positions turn pairs of channels, so that a head has an even number.

    Returns:
        One line; None where they can.
    """
    step = 2 if is_rotary else 1
    if 0 < num_heads <= width and width % (num_heads * step) == 0:
        return None
    # One head always does, so the nearest number is less than twice as many.
    furthest = min(2 * max(1, num_heads), width, MOST_HEADS)
    fits = [n for n in range(1, furthest + 1) if width % (n * step) == 0]
    multiple = max(1, num_heads) * step
    heads = min(fits, key=lambda n: abs(n - num_heads), default=None)
    nearest = f"model.width={max(1, round(width / multiple)) * multiple}"
    return (
        f"model.width, model.num_heads: {num_heads} heads do not share a width of {width}"
        f"{' in even parts, which rotary positions need' if is_rotary else ''}; nearest: {nearest}"
        f"{'' if heads is None else f' or model.num_heads={heads}'}"
    )


def group_faults(pattern: object, settings: object) -> Iterator[str]:
    """Say what is wrong with the settings of one pattern of `optimizer.groups`.

    Yields:
        A line per fault.
    """
    key = f"optimizer.groups[{str(pattern)!r}]"
    if not isinstance(settings, Mapping):
        yield f"{key}: {show(settings)} is not a mapping; type {{lr: 1e-3}}"
        return
    for name, value in settings.items():
        if name not in GROUP_SETTINGS:
            near = did_you_mean(str(name), GROUP_SETTINGS)
            yield f"{key}.{name}: unknown setting.{near or f' It takes {either(GROUP_SETTINGS)}'}"
            continue
        try:
            convert(GROUP_SETTINGS[name], value)
        except ValidationError:
            yield value_fault(f"{key}.{name}", GROUP_SETTINGS[name], value)
    if settings.get("frozen") is True and len(settings) > 1:
        yield f"{key}: frozen parameters have neither lr nor weight_decay; leave these out"


def _scheduler(tree: Tree) -> Iterator[str]:
    """Check that a schedule fits into the run, where its length is known before the data are.

    Yields:
        One line per fault.
    """
    scheduler, steps = tree["scheduler"], tree.get("steps")
    if str(scheduler.get("_target_")) not in ARGUMENTS:
        return
    if scheduler.get("scale") != "none" and scheduler.get("reference_batch") is None:
        yield (
            f"scheduler.reference_batch: scheduler.scale={scheduler.get('scale')} needs the global "
            "batch that optimizer.lr was tuned for, e.g. scheduler.reference_batch=512"
        )
    warmup, share = scheduler.get("warmup"), scheduler.get("decay")
    are_numbers = all(isinstance(x, int | float) for x in (warmup, share, steps))
    if scheduler["_target_"] != WSD or not are_numbers or not steps or warmup > steps:
        return
    decay, warmup = round(share * steps), warmup_steps(warmup, steps)
    if warmup + decay > steps:
        text = (
            f"{decay} steps of decay and scheduler.warmup={warmup} exceed the run's {steps} "
            f"steps; the largest valid value is {int(1000 * (1 - warmup / steps)) / 1000:g}"
        )
        yield line("scheduler.decay", share, text)
