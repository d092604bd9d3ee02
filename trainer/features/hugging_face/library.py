"""Answer what the engine asks about models of transformers; imports it only with them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from inspect import Parameter
from pathlib import Path
from typing import Any, final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from trainer.core.errors import ConfigError
from trainer.core.format import DTYPE_WORDS, python_text
from trainer.core.hub_cache import read_cache_without_network
from trainer.core.micro_batch import Fields
from trainer.features.hugging_face import classes, lora
from trainer.features.hugging_face.by_document import attend_by_document, kernels_of
from trainer.features.hugging_face.continuation import GENERATING, continue_prompt
from trainer.features.hugging_face.fused import known_fused
from trainer.features.hugging_face.model_folder import copy_input_files, read_config, write_pooling
from trainer.features.hugging_face.task import TASKS, WORDS, task_of, task_of_class
from trainer.features.hugging_face.tokenizers import hugging_face_tokenizer, read_template
from trainer.models.bind import OMITTED
from trainer.models.facts import ModelFacts, ModelLibrary

_STORED_WORDS = {word.upper().replace("P", ""): word for word in DTYPE_WORDS.values()}
"""The field's words by those of safetensors, such as `F32`."""
_NUMBERS = {"regression": "regression", "multi_label_classification": "multi_label"}
"""Objectives of classifiers whose config, or whose labels, say that they give numbers."""
_POSITIONS = ("position_embeddings", "wpe", "embed_positions")
"""What models call their tables of positions."""
PRETRAINED = "pretrained_model_name_or_path"
"""Argument of what loads a model: a folder, or a name on the hub."""
_WARNS = "warn_if_padding_and_no_attention_mask"
"""Method that a model calls where it gets no mask."""
_LOADERS = {"from_pretrained", "from_config", "_from_config"}
_DTYPES = ("dtype", "torch_dtype")
# More than any model has, so that all weights go into one file
_ALL = "1000TB"


@final
class HuggingFace(ModelLibrary):
    """Knows the models of transformers, and those whose classes are named as its own."""

    def source_in(self, arguments: Mapping[str, Any]) -> str | None:
        """See the base class; the name may stand at any depth."""
        if isinstance(name := arguments.get(PRETRAINED), str):
            return name
        for value in arguments.values():
            if isinstance(value, Mapping) and (name := self.source_in(value)) is not None:
                return name
        return None

    def callable(
        self, target: Callable[..., Any], arguments: Mapping[str, Any], *, typed: bool
    ) -> tuple[Callable[..., Any], dict[str, Any]]:
        """Let settings of a config object stand for it, and have weights loaded, or drawn, in fp32.

        With the dtype of its file or config, mostly bf16, a model would lose small updates. What
        loads one notes where it is from.
        """
        config, arguments = arguments.get("config"), dict(arguments)
        is_model = hasattr(target, "config_class")
        if is_model and isinstance(config, Mapping) and "_target_" not in config:
            arguments |= arguments.pop("config")
        if "config" not in arguments:
            target = classes.with_config_settings(target, arguments, typed=typed)
        owner = getattr(target, "__self__", None)
        is_of_model = hasattr(owner, "config_class") or hasattr(owner, "_model_mapping")
        if not is_of_model or target.__name__ not in _LOADERS:
            return target, arguments
        parameters = inspect.signature(target).parameters
        takes_any = Parameter.VAR_KEYWORD in {each.kind for each in parameters.values()}
        is_typed = any(arguments.get(name) is not None for name in _DTYPES)
        if ("dtype" in parameters or takes_any) and not is_typed:
            arguments["dtype"] = "float32"
        source = arguments.get(PRETRAINED)
        if target.__name__ == "from_pretrained" and isinstance(source, str):
            target = classes.with_facts(target, source)
        return target, arguments

    def arguments_for_data(
        self, target: str, arguments: Mapping[str, Any], source: str | None
    ) -> Mapping[str, Any]:
        """Read from a config alone what a model is made for, `model_labels` and `max_positions`.

        A source is a folder or file of a config of transformers, or a name on the hub; of one that
        cannot be read nothing is known, and the model says why. A head for another task has no
        labels, but for as many as are typed.
        """
        task = arguments.get("task") or task_of_class(*target.split("."))
        found: dict[str, Any] = {"task": task, "max_positions": None, "model_labels": None}
        if (typed := arguments.get("num_classes")) is not None:
            found["model_labels"] = [f"LABEL_{number}" for number in range(typed)]
        if source is None:
            return found
        read_cache_without_network(source)
        try:
            config: Any = read_config(source)
        except Exception:  # whatever is wrong, the model says it
            return found
        is_both = bool(getattr(config, "is_encoder_decoder", False))
        stated = task_of_class(*(config.architectures or ()), is_encoder_decoder=is_both)
        is_labelled = stated in {"sequence_classification", "token_classification"}
        if is_labelled and task in {None, stated}:
            names = config.id2label
            if typed in {None, len(names)}:
                found["model_labels"] = tuple(names[i] for i in sorted(names)) or None
        found["max_positions"] = getattr(config, "max_position_embeddings", None)
        return found | {"task": task or stated}

    def completed(self, facts: ModelFacts, module: nn.Module) -> ModelFacts:
        """See the base class."""
        task, source = task_of(module), facts.source
        config = getattr(module, "config", None)
        attention = getattr(config, "_attn_implementation", None)
        balances = getattr(config, "output_router_logits", False)
        # A loss that balances experts leaves padding out by the mask.
        may_omit = hasattr(module, _WARNS) and not balances
        writes = task in GENERATING and hasattr(module, "generate")
        loss = getattr(config, "router_aux_loss_coef", 0.0)
        facts = facts.filled(
            task=task,
            has_targets=task == "seq2seq_lm",
            max_positions=_positions_of(module),
            stored_dtypes=partial(_stored_dtypes, source),
            attend_by_document=partial(attend_by_document, module),
            kernels=partial(kernels_of, module),
            fused=partial(known_fused, module),
            without_adapter=lora.switch_of(module),
            uses_flash=None if attention is None else "flash" in attention,
            balance_loss=loss if balances else 0.0,
            omit_mask=partial(_omit_mask, module) if may_omit else None,
            continue_prompt=partial(continue_prompt, module) if writes else None,
        )
        if task is None or not TASKS[task].of_body:
            facts = facts.filled(new_head=facts.new)
        if task is not None:
            facts = facts.filled(objective=partial(_objective, module, facts.pooling))
        if (save := getattr(module, "save_pretrained", None)) is None:
            return facts
        # A saved model is loaded by the class for its task, if it is named so, or by its own.
        kind = own_kind = type(module).__name__
        if task is not None and kind.endswith("".join(TASKS[task].ends[:1])):
            kind = TASKS[task].auto_class
        load, library = f"{kind}.from_pretrained", "transformers"
        if facts.pooling is not None:
            kind = load = "SentenceTransformer"
            library = "sentence-transformers"
        return facts.filled(
            save=partial(save, max_shard_size=_ALL),
            save_beside=partial(_save_beside, module, facts.pooling),
            library_name=library,
            pipeline_tag=_pipeline_of(own_kind, facts.pooling),
            how_to_load=lambda folder: [
                f"from {library.replace('-', '_')} import {kind}",
                f"model = {load}({python_text(str(folder))})",
            ],
        )

    def tokenizer_beside(
        self,
        built: Any,  # noqa: ANN401 - of any class
        source: str | None,
        data: Sequence[Mapping[str, Any]],
    ) -> Any:  # noqa: ANN401 - of any class
        """Give the run's, with the chat template of its data; else that of the model's folder."""
        found = built
        if built is None and source is not None:
            # Raised where there is none beside the model.
            with suppress(ConfigError):
                found = hugging_face_tokenizer(model=source)
        if not hasattr(found, "save_pretrained"):
            return None
        named = {arguments.get("chat_template") for arguments in data} - {None}
        # Of several no single one goes with the weights
        if len(named) == 1:
            found.chat_template = read_template(named.pop())
        return found

    def with_tokenizer(self, lines: list[str], tokenizer: Any, folder: Path) -> list[str]:  # noqa: ANN401 - of any class
        """See the base class."""
        is_beside = any("SentenceTransformer" in line for line in lines)
        if type(tokenizer).__module__.partition(".")[0] != "transformers" or is_beside:
            return lines
        load = f"tokenizer = AutoTokenizer.from_pretrained({python_text(str(folder))})"
        return [*lines, "from transformers import AutoTokenizer", load]


def _pipeline_of(kind: str, pooling: str | None) -> str | None:
    """Give the hub's word for the job of a model, by the name of its class; None if not known."""
    if pooling is not None:
        return "sentence-similarity"
    for end, word in WORDS["pipelines"].items():
        if kind.endswith(end):
            return str(word)
    return None


def _objective(module: nn.Module, pooling: str | None, fields: Fields) -> tuple[str, str]:
    """Name the objective of a model that is made for a task, and why it is that one."""
    task = task_of(module)
    # It is asked of a model with a task alone.
    assert task is not None
    labels, ids = fields.get("labels"), fields.get("input_ids")
    if (of_pairs := TASKS[task].of_pairs) and ids is not None and ids.dim() == 3:  # noqa: PLR2004
        return of_pairs, "as the data give chosen and rejected answers"
    if TASKS[task].objective == "classify" and (problem := _problem_of(module, labels)) in _NUMBERS:
        return _NUMBERS[problem], f"as the model is made for {problem}"
    are_ids = labels is not None and ids is not None and torch.equal(labels, ids)
    if task == "masked_lm" and labels is not None and not are_ids:
        return "token_classify", "as the labels say which tokens are hidden"
    why = f"as the model is made for {task}"
    if pooling:
        why = f"{why}, {pooling} pooling"
    if task == "embedding" and "score" in fields:
        return "cosent", f"{why}, and its pairs have scores"
    return TASKS[task].objective, why


def _problem_of(module: nn.Module, labels: Tensor | None) -> str:
    """Tell what a classifier predicts, as transformers does: by its config, or by the labels."""
    config = getattr(module, "config", None)
    if problem := getattr(config, "problem_type", None):
        return str(problem)
    if getattr(config, "num_labels", None) == 1:
        return "regression"
    # A class has one integer; a flag for each label is a real number, as PyTorch's loss takes it.
    if labels is not None and labels.is_floating_point():
        return "multi_label_classification"
    return "single_label_classification"


def _positions_of(module: nn.Module) -> int | None:
    """Count the positions that a model has a table of; None where it has none."""
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding) and name.rpartition(".")[2] in _POSITIONS:
            # Those of RoBERTa's kind begin behind the padding's, those of OPT's behind two.
            first = part.padding_idx + 1 if part.padding_idx is not None else 0
            return part.num_embeddings - int(getattr(part, "offset", first))
    return None


def _omit_mask(module: nn.Module) -> None:
    """Give a model no mask, from its next binding on."""
    setattr(module, OMITTED, {"attention_mask", *getattr(module, OMITTED, ())})
    # GPT-2 would read ids on the host, to warn of padding
    for part in module.modules():
        vars(part)[_WARNS] = lambda *_: None


def _save_beside(
    module: nn.Module, pooling: str | None, folder: Path, sources: Sequence[str]
) -> None:
    """Write how texts are pooled, and copy from sources what says how inputs are made."""
    if pooling is not None:
        write_pooling(folder, pooling, getattr(module.config, "hidden_size", None))
    for source in sources:
        copy_input_files(source, folder)


def _stored_dtypes(source: str | None) -> list[str]:
    """Name the dtypes of the floating-point weights in the files that a model was loaded from.

    Such as `["bf16"]`; empty where the files are not known or not safetensors.
    """
    hub: Any = sys.modules.get("transformers.utils.hub")
    if source is None or hub is None:
        return []
    try:
        file = hub.cached_file(source, "config.json", local_files_only=True)
        kinds = set[str]()
        for each in Path(file).parent.glob("*.safetensors"):
            with safe_open(str(each), "pt") as tensors:
                kinds |= {tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118
    except (OSError, TypeError, ValueError, SafetensorError):
        return []
    words = list[str]()
    for kind in kinds:
        # Buffers such as positions are integers
        if kind.startswith(("F", "BF")):
            words.append(_STORED_WORDS.get(kind, kind.lower()))
    return sorted(words)
