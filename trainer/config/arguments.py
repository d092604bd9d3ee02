"""What the built-in classes take, beyond names and types: ranges, words, and what must agree.

A class of anyone's own is left to its constructor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError

from trainer.config.durations import warmup_steps
from trainer.config.keys import words_of
from trainer.config.messages import MISSING, clip, did_you_mean, either, line, lookup, show, whole
from trainer.config.rules import steps_of
from trainer.config.sections import (
    COMPONENT_PATHS,
    Count,
    Flag,
    Kind,
    Natural,
    NonNegative,
    Positive,
    Section,
    Share,
    Text,
)

GPT = "trainer.models.gpt.GPT"
TOKENS = "trainer.data.tokens.TokenWindows"
SGD = "trainer.optim.optimizers.SGD"
WSD = "trainer.optim.schedules.WSD"

MOST_HEADS = 1024
"""Among so many a number of heads that fits is looked for, however large the width."""

Part = Annotated[float, Field(ge=0, le=1), Kind("a share from 0 to 1")]
Pair = Annotated[
    int,
    BeforeValidator(whole),
    Field(ge=2),
    Kind("a whole number of at least 2: a token and the next"),
]
Betas = Annotated[
    list[Annotated[float, Field(ge=0, lt=1)]],
    Field(min_length=2, max_length=2),
    Kind("two shares of at least 0 and below 1, e.g. [0.9,0.95]"),
]
Weights = Annotated[list[NonNegative], Kind("a list of numbers, 0 or more, one per class")]


class _GPT(Section):
    vocab_size: Count | None = None
    width: Count = 1
    num_layers: Natural = 1
    num_heads: Count = 1
    max_length: Count | None = None
    mlp_width: Count | None = None
    dropout: Share = 0.0
    norm: Literal["rms", "layer"] = "rms"
    mlp: Literal["swiglu", "gelu"] = "swiglu"
    positions: Literal["rotary", "learned"] = "rotary"
    init_std: Positive | None = None


class _Documents(Section):
    max_length: Pair = 2


class _Text(_Documents):
    field: Text = "text"


class _Tokens(_Documents):
    dtype: Literal["auto", "uint16", "uint32"] = "auto"
    vocab_size: Count | None = None


class _NextToken(Section):
    z_loss: NonNegative = 0.0
    label_smoothing: Share = 0.0


class _Classify(Section):
    class_weights: Weights | None = None
    label_smoothing: Share = 0.0


class _ModelLoss(Section):
    reduction: Literal["sum", "mean"] = "sum"


class _AdamW(Section):
    betas: Betas = Field(default_factory=lambda: [0.0, 0.0])
    eps: NonNegative = 0.0


class _SGD(Section):
    momentum: NonNegative = 0.0


class _Schedule(Section):
    reference_batch: Count | None = None
    scale: Literal["none", "linear", "sqrt"] = "none"
    floor: Part = 0.0
    decay: Part = 0.0


class Settings(Section):
    """What `optimizer.groups` may give to the parameters that a pattern names."""

    lr: NonNegative = 0.0
    weight_decay: NonNegative = 0.0
    frozen: Flag = False


ARGUMENTS: Mapping[str, type[Section]] = {
    GPT: _GPT,
    "trainer.data.stdlib.StdlibText": _Documents,
    "trainer.data.text.Text": _Text,
    TOKENS: _Tokens,
    "trainer.objectives.next_token.NextToken": _NextToken,
    "trainer.objectives.classify.Classify": _Classify,
    "trainer.objectives.model_loss.ModelLoss": _ModelLoss,
    "trainer.optim.optimizers.AdamW": _AdamW,
    SGD: _SGD,
    "trainer.optim.schedules.Constant": _Schedule,
    "trainer.optim.schedules.Cosine": _Schedule,
    WSD: _Schedule,
}
"""Arguments of the built-in classes whose values are not free."""

Tree = Mapping[str, Any]


def arguments(tree: Tree) -> Iterator[str]:
    """Name every argument that the constructor of a built-in class would refuse.

    Yields:
        One line per fault.
    """
    wrong = set()
    for path in COMPONENT_PATHS:
        section = ARGUMENTS.get(str(lookup(tree, f"{path}._target_")), Section)
        for name, value in lookup(tree, path).items():
            if value == MISSING:
                wrong.add(path)
            for fault in _range(section, f"{path}.{name}", value):
                wrong.add(path)
                yield fault
    yield from _groups(lookup(tree, "optimizer.groups"))
    for path, rule in (("model", _model), ("optimizer", _optimizer), ("scheduler", _scheduler)):
        if path not in wrong:
            yield from rule(tree)


def _range(section: type[Section], key: str, value: object) -> Iterator[str]:
    name = key.rpartition(".")[2]
    if name not in section.model_fields or value == MISSING:
        return
    try:
        section.model_validate({name: value})
    except ValidationError:
        words = list(words_of(section.model_fields[name]))
        near = did_you_mean(value, words) if isinstance(value, str) else ""
        yield line(key, value, f"must be {either(words)}{near and f'.{near}'}")


def _model(tree: Tree) -> Iterator[str]:
    """Check the shape of the transformer, and that somebody knows its vocabulary.

    Yields:
        One line per fault.
    """
    model, data = tree["model"], tree["data"]
    if model.get("_target_") != GPT:
        return
    width, num_heads = model.get("width"), model.get("num_heads")
    if width is not None and num_heads is not None:  # else the constructor's own
        fault = heads_fault(width, num_heads, is_rotary=model.get("positions") == "rotary")
        if fault:
            yield clip(fault)
    knows = data.get("_target_") != TOKENS or data.get("vocab_size") is not None
    if model.get("vocab_size") is None and not knows:
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


def _optimizer(tree: Tree) -> Iterator[str]:
    optimizer = tree["optimizer"]
    is_ahead = optimizer.get("_target_") == SGD and optimizer.get("nesterov") is True
    if is_ahead and not optimizer.get("momentum"):
        text = "looks ahead by the momentum; use optimizer.momentum=0.9"
        yield line("optimizer.nesterov", True, text)


def _groups(groups: object) -> Iterator[str]:
    """Check the settings by name pattern; whether a parameter is named so, the model has to say.

    Yields:
        One line per fault.
    """
    if not isinstance(groups, Mapping | None):
        yield line("optimizer.groups", groups, "must be a mapping, e.g. {embed*: {lr: 1e-3}}")
    for pattern, settings in groups.items() if isinstance(groups, Mapping) else ():
        yield from map(clip, group_faults(pattern, settings))


def group_faults(pattern: object, settings: object) -> Iterator[str]:
    """Say what is wrong with the settings of one pattern.

    Yields:
        A line per fault.
    """
    key = f"optimizer.groups[{str(pattern)!r}]"
    if not isinstance(settings, Mapping):
        yield f"{key}: {show(settings)} is no mapping; say {{lr: 1e-3}}"
        return
    fields = Settings.model_fields
    for name, value in settings.items():
        if name not in fields:
            yield f"{key}.{name}: unknown setting.{did_you_mean(str(name), fields) or _has(fields)}"
        else:
            yield from _range(Settings, f"{key}.{name}", value)
    if settings.get("frozen") is True and len(settings) > 1:
        yield f"{key}: what is frozen has neither lr nor weight_decay"


def _has(names: Mapping[str, object]) -> str:
    return f" It takes {either(names)}"


def _scheduler(tree: Tree) -> Iterator[str]:
    """Check that a schedule fits into the run, where its length is known before the data are.

    Yields:
        One line per fault.
    """
    scheduler, steps = tree["scheduler"], steps_of(tree)
    if str(scheduler.get("_target_")) not in ARGUMENTS:
        return
    if scheduler.get("scale") != "none" and scheduler.get("reference_batch") is None:
        yield (
            f"scheduler.reference_batch: scheduler.scale={scheduler.get('scale')} needs the global "
            "batch that optimizer.lr was tuned for, e.g. scheduler.reference_batch=512"
        )
    warmup = scheduler.get("warmup")
    if scheduler["_target_"] == WSD and steps and warmup is not None and warmup <= steps:
        decay, warmup = round(scheduler["decay"] * steps), warmup_steps(warmup, steps)
        if warmup + decay > steps:
            text = (
                f"{decay} steps of decay and scheduler.warmup={warmup} exceed the run's {steps} "
                f"steps; the largest valid value is {int(1000 * (1 - warmup / steps)) / 1000:g}"
            )
            yield line("scheduler.decay", scheduler["decay"], text)
