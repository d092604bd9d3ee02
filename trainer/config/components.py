"""Name the types of a config's values, and the parts of a run that are classes by name.

A type holds a range, a unit and, as its description, the words that an error says it with; those of
a `Literal` are its own. Of the classes, which may be anyone's, this knows the constructors' keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from trainer.config import amounts
from trainer.config.amounts import ABOVE_0, EPOCHS, parse_bytes, parse_count, range_texts, whole
from trainer.config.metric_names import METRICS_KEY, Metrics
from trainer.config.option_files import LIBRARIES, data_dir, default_options

NAMES_A_PATH = re.compile(r"[\w.]*[._](path|paths|file|files|dir|folder|root)([._][\w.]*)?")
"""Keys that may name a file or folder, by a word in them: `data.path`, `data.data_files`."""


def _as_text(value: object) -> object:
    return str(value) if type(value) is int else value


Whole = Annotated[int, BeforeValidator(whole), Field(description="a whole number")]
Natural = Annotated[Whole, Field(ge=0, description="a whole number, 0 or more")]
Count = Annotated[Whole, Field(ge=1, lt=2**63, description="a whole number of at least 1")]
Pair = Annotated[
    Whole, Field(ge=2, description="a whole number of at least 2: a token and the next")
]
GroupSize = Annotated[
    Whole, Field(ge=2, description="a whole number of at least 2: one sample has no variance")
]
Seed = Annotated[Whole, Field(ge=0, lt=2**63, description="a whole number from 0 to 2**63 - 1")]
Number = Annotated[float, Field(description="a number")]
Positive = Annotated[float, Field(gt=0, description="a number above 0")]
NonNegative = Annotated[float, Field(ge=0, description="a number, 0 or more")]
Share = Annotated[float, Field(ge=0, lt=1, description="a fraction of at least 0 and below 1")]
EmaDecay = Annotated[float, Field(gt=0, lt=1, description="a number between 0 and 1, e.g. 0.999")]
Part = Annotated[float, Field(ge=0, le=1, description="a fraction from 0 to 1")]
_NOT_1_0 = BeforeValidator(lambda value: None if repr(value) == "1.0" else value)  # 0.9: a share
_STEPS = Field(description="a number of steps (1, not 1.0)")
_RUN_SHARE = Annotated[float, Field(gt=0, lt=1, description="a fraction of the run below 1")]
Cadence = Annotated[Count, _NOT_1_0, _STEPS] | _RUN_SHARE
Time = Annotated[  # above 0
    str,
    Field(
        pattern=r"^(\d*[1-9]\d*(\.\d+)?|\d+\.\d*[1-9]\d*) ?(s|min|h)$",
        description="a time such as 10min",
    ),
]
Bandwidth = Annotated[
    str,
    Field(
        pattern=f"^{amounts.BANDWIDTH.pattern}$",
        description="bits or bytes a second, such as 400Gbps or 50GB/s",
    ),
]
Warmup = Annotated[Natural, _NOT_1_0, _STEPS] | Share
AMOUNT = re.compile(ABOVE_0 + "([kMG])?(samples|tokens|epochs?)")
Amount = Annotated[
    str,
    Field(
        pattern=f"^{AMOUNT.pattern}$",
        description="an amount such as 2000samples, 1Mtokens or 1epoch",
    ),
]
Epochs = Annotated[str, Field(pattern=f"^{EPOCHS.pattern}$", description="epochs such as 1epoch")]
Stages = Annotated[
    dict[
        Annotated[int | float, BeforeValidator(parse_count), Field(ge=0)],
        Annotated[int, BeforeValidator(parse_count), Field(ge=1, lt=2**63)],
    ],
    Field(min_length=1, description="sizes by what batch.at counts, e.g. {0: 64, 20k: 256}"),
]
StepRanges = Annotated[
    tuple[str, ...],
    BeforeValidator(range_texts),
    Field(strict=False, description="steps such as 401-410, or a list: [401-410,450]"),
]
Betas = Annotated[
    Sequence[Share],
    Field(min_length=2, max_length=2, description="two fractions of at least 0 and below 1"),
]
Weights = Annotated[Sequence[NonNegative], Field(description="a list of numbers, one per class")]
ClassWeights = Weights | dict[str | int, NonNegative] | Literal["balanced"]
Bytes = Annotated[
    int, BeforeValidator(parse_bytes), Field(ge=1, description="a size such as 80GiB")
]
NonEmptyText = Annotated[str, Field(min_length=1, description="text")]
PlainText = Annotated[str, BeforeValidator(_as_text), Field(description="text")]
FieldName = NonEmptyText  # of a record
FREE = "no step depends on it"  # marks an argument that a run which goes on may change
SamplesToEvaluate = Annotated[Count | None, FREE]
SENDS = "writes or sends figures elsewhere"
"""Marks what says where a run's figures go, which neither a recipe nor a run may."""
Online = Annotated[Literal["online"], SENDS]
Address = Annotated[NonEmptyText, SENDS]
ExistingPath = Annotated[
    str, BeforeValidator(_as_text), Field(description="the path of a file or folder")
]
PathOrName = Annotated[NonEmptyText, "may be a name on the hub"]
WeightsPath = Annotated[
    str, BeforeValidator(_as_text), Field(description="a run, or the path or name of weights")
]
NameInPath = Annotated[str, BeforeValidator(_as_text), Field(min_length=1, description="a name")]
"""A part of what a path holds; a held-out set with a path of its own does not take it over."""
Task = Literal[
    "causal_lm",
    "masked_lm",
    "seq2seq_lm",
    "sequence_classification",
    "token_classification",
    "question_answering",
    "multiple_choice",
    "image_classification",
    "image_text_to_text",
    "embedding",
]
"""What a model is made for."""
AttentionKernel = Literal[
    "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"
]
"""Kernels of attention; one on the hub, which is code, is none."""
FloatType = Literal["float32", "bfloat16", "float16", "float64"]
Pooling = Literal["mean", "cls", "last"]
"""How the embeddings of a text's tokens become one: their mean, the first, or the last."""
Word = Annotated[
    str,
    BeforeValidator(_as_text),
    Field(pattern=r"^\w[\w.-]{0,99}$", description="one word of letters, digits, -, _ and ."),
]
Name = Annotated[Word, Field(pattern=r"^[^.]*$")]  # which begins those of figures
Figure = Annotated[
    str,
    Field(
        pattern=r"^(ema_)?eval_[\w.-]+$", description="a figure of metrics.jsonl, e.g. eval_loss"
    ),
]
Words = Annotated[
    tuple[str, ...],
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    Field(strict=False, description="a list, e.g. [a,b]"),
]
ColumnNames = Annotated[
    dict[str, str | Annotated[list[str], Field(min_length=1)] | None],
    Field(description="a mapping of roles to names of columns, e.g. {text: body}"),
]
NamedValues = Annotated[dict[str, Any], Field(description="a mapping of names to values, {a: 1}")]
ConfigFields = Annotated[dict[str, Any], Field(description="what a config.json holds")]
AUGMENT = "data.augment"


def _as_targets(value: object) -> object:
    """Let a name stand for a class to be built, or for a function as it is."""
    entries = value if isinstance(value, list | tuple) else [value]
    targets = list[object]()
    for each in entries:
        if isinstance(each, str) and "." in each:
            targets.append({"_target_": each, "_partial_": True})
        else:
            targets.append(each)
    return targets


Augmentations = Annotated[
    Sequence[Any],
    BeforeValidator(_as_targets),
    Field(description="a list, e.g. [{_target_: torchvision.transforms.v2.RandomCrop, size: 8}]"),
]
"""Callables that change an image, given built."""
PerChannel = Annotated[
    Sequence[Number], Field(min_length=1, description="a list of numbers, one per channel")
]
ModuleNames = Annotated[
    str | Sequence[NonEmptyText],
    Field(description="a list of names, e.g. [q_proj,v_proj], or a pattern"),
]
Sources = Annotated[
    dict[Name, dict[str, Any]],
    Field(min_length=1, description="a mapping, e.g. {code: {path: code.jsonl, weight: 3}}"),
]
"""Data sets by name, each with settings of its own; an argument of it is given them opened."""
SourceStages = Annotated[
    dict[
        Annotated[int, BeforeValidator(parse_count), Field(ge=0)],
        dict[str, Annotated[float, Field(ge=0, lt=1e9)]],
    ],
    Field(
        min_length=1,
        description="weights of sources by samples, e.g. {0: {web: 3, code: 1}, 2M: {web: 1}}",
    ),
]
ParameterGroups = Annotated[
    dict[str, dict[Literal["lr", "weight_decay", "frozen"], bool | NonNegative]],
    Field(
        description="a mapping of name patterns to lr, weight_decay, frozen, e.g. {a*: {lr: 1e-3}}"
    ),
]
AutoWord = Literal["auto"]
LossReduction = Literal["sum", "mean"]
# What becomes of a document longer than `max_length`: several samples, its head, nothing
Overlong = Literal["chunk", "cut", "drop"]

_STRICT = ConfigDict(strict=True, allow_inf_nan=False)


class Section(BaseModel):
    """Keys that belong together; frozen, and strict about types and names."""

    # Deferred, as `--help` reads the fields alone: validators take 60 ms to build
    model_config = ConfigDict(**_STRICT, frozen=True, extra="forbid", defer_build=True)


def type_like(example: object) -> Any:  # noqa: ANN401 - a type, which has no type of its own
    """Give the type of the values that may stand in place of an option's own; None: any."""
    if isinstance(example, list):
        inner = type_like(example[0]) if example else Any
        return Annotated[list[inner], Field(description="a list")]  # type: ignore[valid-type]
    kinds = ((bool, bool), (int, Whole), (float, Number), (str, PlainText))
    for python, kind in kinds:
        if isinstance(example, python):
            return kind
    return Any


def convert(annotation: Any, value: object) -> Any:  # noqa: ANN401 - gives what the type holds
    """Read a value as a type; a `ValidationError` where it is of another, or out of range."""
    return TypeAdapter(annotation, config=_STRICT).validate_python(value)


def fits(annotation: Any, value: object) -> bool:  # noqa: ANN401 - see `convert`
    """Whether a value is one of a type."""
    with suppress(ValidationError):
        convert(annotation, value)
        return True
    return False


LIBRARY_BASES: Mapping[str, Mapping[str, str]] = LIBRARIES["bases"]
"""Modules of the model libraries whose classes a recipe may name without being trusted: by the
component they are for, each with the base that they must have."""

LIBRARY_ROOTS = {module.partition(".")[0] for each in LIBRARY_BASES.values() for module in each}

NO_ADAPTER = "trainer.models.transform.Unchanged"
AUTO_OBJECTIVE = "trainer.assemble.objective.ByModel"

SHARED: Mapping[str, Mapping[str, Any]] = {
    "accum": {
        **dict.fromkeys(("micro", "steps", "max_tokens"), Count | None),
        "memory": Bytes | None,
    },
    "data": {"max_length": Pair, "overlong": Overlong, "holdout": Share | Literal["all"]},
    "optimizer": {
        **dict.fromkeys(("lr", "weight_decay"), NonNegative),
        "groups": ParameterGroups,
        "layer_decay": EmaDecay | None,
    },
    "scheduler": {
        "warmup": Warmup | Amount,
        "reference_batch": Count | None,
        "scale": Literal["none", "linear", "sqrt"],
        "keep_half_life": bool,
    },
}
"""Types of arguments that mean the same in every class of a component."""

FROM_DATA = ("vocab_size", "max_length")
"""Arguments of a model that the data give where they are null."""


class Component(Section):
    """A class that is named in the config, and what its constructor gets."""

    target: str = Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$")  # import path of the class
    params: dict[str, Any] = Field(default_factory=dict)  # constructor arguments
    # The option it was chosen by, e.g. `gpt_tiny`; None for a class of one's own.
    name: str | None = None
    # The user named the class, and every class among its arguments, on their own command line or in
    # their own `--config-dir`, which is consent to run them. Never read from a file.
    typed_target: bool = False

    @property
    def label(self) -> str:
        """Its option, or the import path of a class of one's own."""
        return self.name or self.target


class Accum(Component):
    """How a global batch is cut into micro-batches, and how their gradients are joined."""

    gradient: Component
    packed: bool | AutoWord
    buffer: Literal["native", "fp32"]


class DataKeys(Component):
    """The samples."""

    on_bad: Literal["stop", "skip"]
    split_seed: Seed
    eval_path: ExistingPath | None
    show: Natural
    skip_steps: StepRanges


class ObjectiveKeys(Component):
    """What is summed."""

    metrics: Metrics


class Batch(Component):
    """The sizes of the optimizer steps."""

    # Null only where accum.micro and accum.steps give it.
    global_batch: Annotated[Count | None, Field(description="a whole number of at least 1")] = (
        Field(alias="global")
    )
    unit: Literal["samples", "tokens"]
    normalizer: Literal["tokens", "samples", "micro_batches"]
    tail: Literal["keep", "drop"]


_ENGINE: Mapping[str, type[Component]] = {
    "batch": Batch,
    "accum": Accum,
    "accum.gradient": Component,
    "sync": Component,
    "model": Component,
    "tokenizer": Component,
    "adapter": Component,
    "data": DataKeys,
    "objective": ObjectiveKeys,
    "optimizer": Component,
    "scheduler": Component,
}

FEATURES: tuple[str, ...] = tuple(
    group
    for group in default_options(data_dir("conf"))
    if group not in {*_ENGINE, "parallel", "recipe"} and group.isidentifier()
)
"""Groups whose classes are features: those of the primary config beyond the engine's own."""

COMPONENTS: Mapping[str, type[Component]] = {**_ENGINE, **dict.fromkeys(FEATURES, Component)}
"""Where a config names a class, by dotted key."""

LISTS: tuple[str, ...] = ("transforms", "parts", "hooks", "logger")
"""Where a config names several classes, in their order."""

EVAL_SETS = "eval.sets"
"""Where a config names held-out sets, each with the arguments of its data that differ."""

GROUPS: tuple[str, ...] = ("parallel", *COMPONENTS)
"""Where a folder of `conf/` gives options; `accum.gradient` is the folder `accum/gradient`."""


def extra_keys(path: str) -> dict[str, str]:
    """Name the program's own keys beside the arguments of a class, each with its attribute."""
    fields = COMPONENTS.get(path, Component).model_fields.items()
    return {f.alias or name: name for name, f in fields if name not in Component.model_fields}


def owner_of(key: str) -> str | None:
    """Name the innermost component that a dotted key belongs to; a held-out set is like data."""
    if key.startswith(f"{EVAL_SETS}."):
        return "data"
    owners = [path for path in COMPONENTS if f"{key}.".startswith(f"{path}.")]
    return max(owners, key=len, default=None)


def targets_in(place: str, value: object) -> Iterator[tuple[str, str]]:
    """Find each class that a setting names, at any depth: dotted key, and import path."""
    if isinstance(value, Mapping):
        if "_target_" in value:
            yield place, str(value["_target_"])
        for name, inner in value.items():
            yield from targets_in(f"{place}.{name}", inner)
    elif isinstance(value, list):
        for inner in value:
            yield from targets_in(place, inner)
    elif (
        isinstance(value, str) and "." in value and place in {AUGMENT, METRICS_KEY}
    ):  # a name alone
        yield place, value
