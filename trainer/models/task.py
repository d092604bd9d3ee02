"""Tell what a model is made for: as it declares, or as its class is named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final, get_args

from torch import nn

from trainer.config.components import Task
from trainer.core.hub_cache import read_cache_without_network
from trainer.models.model_folder import CONFIG_FAULTS, read_config

# Ends of class names in transformers and peft; the first that fits counts.
_TASKS: Mapping[str, Task] = {
    "LMHeadModel": "causal_lm",
    "ForCausalLM": "causal_lm",
    "ForMaskedLM": "masked_lm",
    "ForSeq2SeqLM": "seq2seq_lm",
    "ForSequenceClassification": "sequence_classification",
    "ForAudioClassification": "sequence_classification",
    "ForVideoClassification": "image_classification",
    "ForImageClassification": "image_classification",
    "ForTokenClassification": "token_classification",
    "ForQuestionAnswering": "question_answering",
    "ForMultipleChoice": "multiple_choice",
    "ForConditionalGeneration": "image_text_to_text",
}


POOLING = "text_pooling"
"""Attribute of a model that embeds texts: how, a word of `Pooling`."""
_LABELLED: tuple[Task, ...] = ("sequence_classification", "token_classification")


def task_of_class(*names: str, is_encoder_decoder: bool = False) -> Task | None:
    """Tell what a class of transformers is made for by its name, or by those of its bases."""
    task = next((t for n in names for end, t in _TASKS.items() if n.endswith(end)), None)
    return "seq2seq_lm" if is_encoder_decoder and task in {None, "image_text_to_text"} else task


@final
@dataclass(frozen=True)
class Purpose:
    """What a model is made for, as far as its config says it."""

    task: Task | None = None
    max_positions: int | None = None
    labels: tuple[str, ...] | None = None  # names of the classes of the head that is there


def stated_purpose(source: str, task: Task | None) -> Purpose:
    """Read what a model is made for from its config alone.

    A source is a folder or file of a config of transformers, or a name on the hub; of one that
    cannot be read nothing is known, and the model says why. A head for another task has no labels.
    """
    read_cache_without_network(source)
    from huggingface_hub.errors import StrictDataclassError  # noqa: PLC0415 - seconds, and only for this

    try:
        config: Any = read_config(source)
    except (*CONFIG_FAULTS, StrictDataclassError):
        return Purpose(task)
    is_encoder_decoder = bool(getattr(config, "is_encoder_decoder", False))
    stated = task_of_class(*(config.architectures or ()), is_encoder_decoder=is_encoder_decoder)
    names = config.id2label if stated in _LABELLED and task in {None, stated} else None
    labels = names and tuple(names[i] for i in sorted(names))
    positions = getattr(config, "max_position_embeddings", None)
    return Purpose(task or stated, positions, labels or None)


def task_of(module: nn.Module) -> Task | None:
    """Tell what a model is made for; None where nothing says it.

    What counts first is an attribute `task` of the module with a word of `Task`; then
    the name of its class, or of one that it inherits from; of an adapter, the model inside it.
    An encoder-decoder is one by `config.is_encoder_decoder`.
    """
    declared = getattr(module, "task", None)
    if declared in get_args(Task):
        return declared
    names = (kind.__name__ for kind in type(module).__mro__)
    is_encoder_decoder = getattr(getattr(module, "config", None), "is_encoder_decoder", None)
    task = task_of_class(*names, is_encoder_decoder=is_encoder_decoder is True)
    inner = getattr(module, "get_base_model", None)  # peft's
    return task_of(inner()) if task is None and callable(inner) else task
