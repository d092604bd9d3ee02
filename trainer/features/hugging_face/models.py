"""Build a model of transformers with the head that a task needs: from files, or from a config."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.config import components
from trainer.config.messages import did_you_mean_name
from trainer.core.errors import ConfigError, TrainError
from trainer.core.hub_cache import read_cache_without_network
from trainer.core.user_code import quiet
from trainer.data.samples import LabelKind
from trainer.features.hugging_face.added_tokens import begin_rows
from trainer.features.hugging_face.classes import facts_of_loading, with_config_settings
from trainer.features.hugging_face.lazy_loading import load_unread
from trainer.features.hugging_face.model_folder import (
    not_found,
    pooling_of,
    read_config,
    refuse_adapter,
    refuse_files,
    refuse_sizes,
)
from trainer.features.hugging_face.task import TASKS, task_of, task_of_class
from trainer.models.facts import ModelFacts

_PROBLEMS = {"flags": "multi_label_classification", "numbers": "regression"}
"""What a config calls labels that are no classes."""


def hugging_face(  # noqa: PLR0913, PLR0917 - the keys of `model`
    path: components.ExistingPath | None = None,
    config: components.ExistingPath | components.ConfigFields | None = None,
    task: components.Task | None = None,
    dtype: components.FloatType = "float32",
    attn_implementation: components.AttentionKernel | None = None,
    num_classes: components.Count | None = None,
    ignore_mismatched_sizes: bool = False,
    label_names: Sequence[str] | None = None,
    label_kind: LabelKind | None = None,
    pad_token_id: int | None = None,
    pooling: components.Pooling | None = None,
    new_token_ids: Sequence[int] | None = None,
) -> tuple[nn.Module, ModelFacts]:
    """Build a model of transformers; no code of a model's folder is run, and no pickle read.

    Gives it with what is known of it. The keys of `conf/model/hf.yaml` say what the arguments are.
    Of the others, `label_names` are those of the classes in their order; inputs are padded with
    `pad_token_id`, by which classifiers among decoders find the last token. None leaves both to the
    model's config. Rows of `new_token_ids` begin as the mean of those before them.
    """
    if (path is None) == (config is None):
        both = "both path and config are given: " if path is not None else ""
        raise ConfigError(
            f"model: {both}type model.path=FOLDER for a model with its weights, or "
            "model.config=FILE for one with random weights"
        )
    settings = config if isinstance(config, dict) else {}
    source = str(path or settings.get("model_type") or config)
    if not settings:
        read_cache_without_network(source)
    if path is not None:
        refuse_adapter(path)
    import transformers  # noqa: PLC0415 - seconds, and only for this option

    key = "model.config" if path is None else "model.path"
    options = {"dtype": getattr(torch, dtype)}
    if attn_implementation is not None:  # else what the config says counts
        options["attn_implementation"] = attn_implementation
    try:
        found = _read_config(settings, source)
        made_for = _prepare(found, f"{key}={source}", task, num_classes, label_names, label_kind)
        kind, facts = getattr(transformers, TASKS[made_for].auto_class), ModelFacts()
        with quiet():
            if path is None:
                module = kind.from_config(found, **options)
            else:
                begins_new = ignore_mismatched_sizes
                module, facts = _load(kind, found, path, options, begins_new=begins_new)
    except TrainError:
        raise
    except Exception as error:  # a config that is not as it should be breaks it anywhere
        # Of a typed mapping nothing is looked for.
        typed = "" if settings else source
        raise ConfigError(f"{key}={source}: {_cause(error, typed)}") from error
    if num_classes is not None and not TASKS[made_for].has_classes:
        why = f"a model for {made_for} has no classes"
        facts = replace(facts, unused_arguments={"num_classes": why})
    pooling = pooling_of(made_for, pooling, path)
    # The class of a model that embeds texts is named for no task.
    facts = replace(facts, pooling=pooling, task=made_for if pooling else None)
    begin_rows(module, new_token_ids or ())
    # An embedding that is built with its padding gives that row no gradient, and it may be that of
    # the end of a text: the padding is set afterwards, and not in an export of another model.
    if pad_token_id is not None and task_of(module) == "sequence_classification":
        module.config.pad_token_id = pad_token_id
    return module, facts


def _cause(error: Exception, typed: str) -> str:
    """Say in a line why transformers builds no model of a path or name on the hub, if any."""
    text = f"transformers cannot build it: {' '.join(str(error).split())}"
    if "Unrecognized configuration class" in text:  # and a list of all there are
        return "transformers has no such model for this model.task; type another"
    if "trust_remote_code" in text:
        return "it needs code from its own folder, which is not run; use another"
    if isinstance(error, OSError) and typed and not Path(typed).exists():
        return not_found("model", typed)
    return text


def _read_config(settings: Mapping[str, Any], source: str) -> Any:  # noqa: ANN401 - any config
    """Make a config of settings, each of which has to be a field of it, else of a source."""
    from transformers import AutoConfig  # noqa: PLC0415 - seconds, and only for this option

    if not settings:
        return read_config(source)
    refuse_sizes(settings, source)
    found: Any = AutoConfig.for_model(**settings)
    kind = type(found)
    known = inspect.signature(with_config_settings(kind, settings, typed=True)).parameters
    for name in settings.keys() - {*known, "model_type"}:
        rest = {**settings}
        for left_out in (name, "model_type"):
            rest.pop(left_out, None)
        with quiet():
            others = kind(**rest).to_dict()
        # What is known by another name changes another field.
        if name not in others and {**others, name: settings[name]} == found.to_dict():
            near = did_you_mean_name(name, {*others, *known}) or " Leave it out"
            raise ConfigError(f"model.config.{name}: {kind.__name__} has no such field.{near}")
    return found


# On the meta device it gives a model that knows where its weights are, if they are as in its files.
hugging_face.loads_on_meta = True  # type: ignore[attr-defined]


def _load(
    kind: Any,  # noqa: ANN401 - of transformers, untyped
    found: Any,  # noqa: ANN401 - any config
    path: str,
    options: Mapping[str, Any],
    *,
    begins_new: bool,
) -> tuple[Any, ModelFacts]:
    """Load a model, on the meta device unread.

    Weights of other sizes than the model's are refused, unless it begins new with these.
    """
    refuse_files(path)
    options = {**options, "output_loading_info": True, "ignore_mismatched_sizes": True}
    if torch.get_default_device().type == "meta":
        module, report = load_unread(kind, found, path, **options)
    else:
        safe = {"trust_remote_code": False, "use_safetensors": True}
        module, report = kind.from_pretrained(path, config=found, **safe, **options)
    if report["mismatched_keys"] and not begins_new:
        name, stored, built = min(report["mismatched_keys"])
        raise ConfigError(
            f"model.path={path}: {name} is {tuple(stored)} in the files and {tuple(built)} in the "
            "model; where its classes are others, type model.ignore_mismatched_sizes=true, with "
            "which it begins new"
        )
    # No way of pooling takes what a pooler gives
    if kind.__name__ == "AutoModel":
        missing = [name for name in report["missing_keys"] if not name.startswith("pooler.")]
        report = {**report, "missing_keys": missing}
    return module, facts_of_loading(path, report)


def _prepare(
    found: Any,  # noqa: ANN401 - any config
    source: str,
    task: components.Task | None,
    num_classes: int | None,
    label_names: Sequence[str] | None,
    label_kind: LabelKind | None,
) -> components.Task:
    """Find what a config's model is made for, and set the labels of its head."""
    names = found.architectures or ()
    is_encoder_decoder = bool(getattr(found, "is_encoder_decoder", False))
    stated = task_of_class(*names, is_encoder_decoder=is_encoder_decoder)
    made_for = task or stated
    if made_for is None:
        raise ConfigError(
            f"{source}: {', '.join(names) or 'no class'} in its config says no task: type one, "
            f"such as model.task=causal_lm ({', '.join(TASKS)})"
        )
    inner = [getattr(found, name, None) for name in found.sub_configs]
    for each in (found, *inner):
        kernel = getattr(each, "_attn_implementation", None) or ""
        if "/" in kernel:
            raise ConfigError(
                f"{source}: its config names an attention kernel on the hub, which is code and is "
                "not run: take attn_implementation out of its config.json"
            )
    if made_for == "embedding" and is_encoder_decoder:
        raise ConfigError(
            f"{source}: model.task=embedding takes an encoder or a decoder, and this is both; "
            "type another model"
        )
    if num_classes is not None and TASKS[made_for].has_classes:
        found.num_labels = num_classes
    if made_for == "sequence_classification" and label_kind in _PROBLEMS:
        found.problem_type = _PROBLEMS[label_kind]
    if label_names and len(label_names) == found.num_labels:
        found.id2label = dict(enumerate(label_names))
        found.label2id = {name: number for number, name in enumerate(label_names)}
    return made_for
