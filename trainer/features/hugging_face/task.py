"""Say of each task what stands for it: a class, records, an objective, and peft's words."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import nn

from trainer.config.components import Task
from trainer.config.option_files import data_dir, load_yaml
from trainer.models.facts import noted_facts


@final
@dataclass(frozen=True, kw_only=True)
class TaskWords:
    """What transformers, peft, records and objectives call a task."""

    objective: str  # an option
    # Ends of the names of classes of transformers that are made for it, the usual one first
    ends: Sequence[str] = ()
    formats: Sequence[str] = ()  # what a record may hold, the first that fits first
    of_pairs: str | None = None  # the option where samples are pairs of answers
    peft: str | None = None
    trained_heads: Collection[str] = ()  # which peft trains whole, and loads, whatever files say
    has_classes: bool = False
    of_body: bool = False  # whether a head is of the body, and seldom new

    @property
    def auto_class(self) -> str:
        """Name the class of transformers that builds and loads its models."""
        return f"AutoModel{''.join(self.ends[:1])}"


WORDS = load_yaml(data_dir("conf") / "hugging_face.yaml")
TASKS: Mapping[Task, TaskWords] = {
    task: TaskWords(**words) for task, words in WORDS["tasks"].items()
}


def task_of_class(*names: str, is_encoder_decoder: bool = False) -> Task | None:
    """Tell what a class of transformers is made for by its name, or by those of its bases."""
    found: Task | None = None
    # The first name that says a task counts, and is looked at last.
    for name in reversed(names):
        for task, words in TASKS.items():
            if name.endswith(tuple(words.ends)):
                found = task
    # Many encoder-decoders are named as models of images and text are, `ForConditionalGeneration`.
    if is_encoder_decoder and found in {None, "image_text_to_text"}:
        return "seq2seq_lm"
    return found


def task_of(module: nn.Module) -> Task | None:
    """Tell what a model is made for; None where nothing says it.

    What counts first is the fact `task` of its maker, or an attribute `task` of the module, with a
    word of `Task`; then the name of its class, or of one that it inherits from; of an adapter, the
    model inside it. An encoder-decoder is one by `config.is_encoder_decoder`.
    """
    declared: Any = noted_facts(module).task or getattr(module, "task", None)
    if declared in TASKS:
        return declared  # type: ignore[no-any-return] # one of its words
    names = [kind.__name__ for kind in type(module).__mro__]
    is_encoder_decoder = getattr(getattr(module, "config", None), "is_encoder_decoder", None)
    task = task_of_class(*names, is_encoder_decoder=is_encoder_decoder is True)
    inner = getattr(module, "get_base_model", None)  # peft's
    return task_of(inner()) if task is None and callable(inner) else task
