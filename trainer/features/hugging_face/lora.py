"""Train matrices of low rank beside frozen layers (Hu et al. 2021, 2106.09685), by peft.

Its layers are put into the model in place, so that its class, its `forward` and the names of what
it gives stay. In files names are those that peft's own model has, which wraps it twice.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, final, get_type_hints

import torch
from pydantic import ValidationError
from safetensors.torch import save_file
from torch import Tensor, nn

from trainer.config.components import Count, ModuleNames, Share, Words, convert
from trainer.config.messages import did_you_mean, first_of, show, value_fault
from trainer.core.errors import ConfigError
from trainer.core.format import python_text
from trainer.core.hub_cache import hub_name
from trainer.features.hugging_face.task import TASKS, TaskWords, task_of
from trainer.models.facts import facts_of, noted_facts
from trainer.models.output_layer import candidate
from trainer.models.transform import ModelTransform

_NAME = "default"  # of the one adapter
_ALL = "all-linear"
_PREFIX = "base_model.model."
# First weights that no value of the model decides
_DRAWN = (True, "gaussian")
# First weights that peft computes from samples
_BY_DATA = ("corda", "eva", "lora_ga")
_SCALES = ("lora_alpha", "alpha_pattern", "use_rslora")  # which no shape of a weight tells


@final
class Lora(ModelTransform):
    """Adds matrices of low rank to layers, and freezes all else but `modules_to_save`.

    Its arguments are the keys of `conf/adapter/lora.yaml`, and all fields of peft's `LoraConfig`.
    """

    is_adapter = True
    passes_on = "peft.LoraConfig"
    library_name = "peft"
    """What loads an export of it."""

    def __init__(
        self,
        r: Count = 8,
        lora_alpha: Count = 8,
        lora_dropout: Share = 0.0,
        target_modules: ModuleNames = _ALL,
        modules_to_save: Words | None = None,
        **others: Any,  # noqa: ANN401 - as peft has them
    ) -> None:
        from peft import LoraConfig  # noqa: PLC0415 - seconds, and only for this option

        if (first := others.get("init_lora_weights", True)) in _BY_DATA:
            raise ConfigError(
                f"adapter.init_lora_weights={first}: is computed from samples before training, "
                "which is not done here; type olora, pissa, orthogonal, gaussian or true"
            )
        hints = get_type_hints(LoraConfig)
        for name, value in others.items():
            kind = hints[name]
            if kind not in {bool, int, float}:
                # peft itself says what is wrong with a value of another type.
                kind = object
            try:
                convert(kind, value)
            except ValidationError as error:
                raise ConfigError(value_fault(f"adapter.{name}", hints[name], value)) from error
        layers = target_modules if isinstance(target_modules, str) else [*target_modules]
        try:
            self._config = LoraConfig(
                r=r,
                lora_alpha=lora_alpha,
                lora_dropout=lora_dropout,
                target_modules=layers,
                modules_to_save=[*modules_to_save] if modules_to_save else None,
                **others,
            )
        except (TypeError, ValueError, ImportError) as error:
            raise ConfigError(f"adapter: {' '.join(str(error).split())}") from error
        self.draws_on_meta = first in _DRAWN and not modules_to_save and not self._config.use_dora

    def __call__(self, model: nn.Module) -> nn.Module:
        """See the base class."""
        from peft.tuners.lora import LoraModel  # noqa: PLC0415 - see above
        from transformers import PreTrainedModel  # noqa: PLC0415 - see above

        config: Any = deepcopy(self._config)
        names = [name for name, _ in model.named_modules() if name]
        _refuse_unmatched("target_modules", config.target_modules, names)
        _refuse_unmatched("modules_to_save", config.modules_to_save, names)
        if isinstance(model, PreTrainedModel):
            task = task_of(model)
            if not config.task_type and task is not None:
                config.task_type = TASKS[task].peft
        elif config.target_modules == _ALL:  # of transformers' models peft knows the output layer
            output = candidate(model)
            config.target_modules = set()
            for name, part in model.named_modules():
                if isinstance(part, nn.Linear) and part is not output:
                    config.target_modules.add(name)
        heads = [name for name in _words(config).trained_heads if name in names]
        whole = [*(config.modules_to_save or ()), *_new_modules(model), *heads]
        config.modules_to_save = [*dict.fromkeys(whole)] or None
        self.draws_on_meta &= not whole  # they are copied
        try:
            LoraModel(model, config, _NAME)
        except (TypeError, ValueError, LookupError, RuntimeError, ImportError) as error:
            raise ConfigError(f"adapter: {' '.join(str(error).split())}") from error
        _widen(model, config)
        return model

    def names_in(self, folder: Path, model: nn.Module) -> Mapping[str, str]:
        """Give the name in the model of each weight that an exported adapter holds."""
        from peft import LoraConfig  # noqa: PLC0415 - see above

        theirs = LoraConfig.from_pretrained(str(folder))
        base, own_base = theirs.base_model_name_or_path, noted_facts(model).source
        if base and own_base and _last_name(base) != _last_name(own_base):
            raise ConfigError(
                f"model.path={own_base}: init={folder} was trained on {base}; type model.path="
                f"{base}, or, if this is the same model, write its path into adapter_config.json"
            )
        for name in _SCALES:
            own, other = getattr(self._config, name), getattr(theirs, name)
            if own != other:
                text = f"init={folder} was trained with {show(other)}; type adapter.{name}="
                raise ConfigError(f"adapter.{name}={show(own)}: {text}{show(other)}")
        names = {id(tensor): name for name, tensor in model.state_dict(keep_vars=True).items()}
        return {stored: names[id(tensor)] for stored, tensor in _in_files(model).items()}

    def save(self, model: nn.Module, base: str | None, folder: Path) -> None:
        """Write the adapter as peft's `from_pretrained` loads it, with the name of its base.

        Beside one of a classifier stands the model's own config, which has the names of classes.
        """
        config = deepcopy(_config_of(model))
        config.base_model_name_or_path = config.base_model_name_or_path or base
        config.inference_mode = True
        # Without a task peft's loader asks for the class of the base.
        if config.task_type is None:
            names = {"base_model_class": type(model).__name__}
            config.auto_mapping = {**names, "parent_library": type(model).__module__}
        if not isinstance(config.target_modules, str):
            config.target_modules = sorted(config.target_modules)
        tensors = {name: tensor.contiguous() for name, tensor in _in_files(model).items()}
        save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
        config.save_pretrained(str(folder))
        if _words(config).trained_heads:
            its_config: Any = model.config
            its_config.save_pretrained(str(folder))

    def how_to_load(self, model: nn.Module, base: str | None, folder: Path) -> list[str]:
        """Give the lines of Python that load what `save` wrote."""
        place = python_text(str(folder))
        if base is None:
            load = f"model = PeftModel.from_pretrained(base, {place})  # base: as it was built"
            return ["from peft import PeftModel", load]
        words = _words(_config_of(model))
        kind = f"AutoPeftModel{''.join(words.ends[:1])}"
        if words is TASKS["embedding"]:
            # As peft calls the class for a body alone
            kind = "AutoPeftModelForFeatureExtraction"
        more = ""
        if kind.endswith("Classification"):
            its_config: Any = model.config
            more = f", id2label={its_config.id2label}, label2id={its_config.label2id}"
        return [f"from peft import {kind}", f"model = {kind}.from_pretrained({place}{more})"]

    def merge(self, model: nn.Module) -> nn.Module:
        """Add the matrices to the weights beside them; the model has its own names then."""
        from peft.tuners.tuners_utils import BaseTunerLayer  # noqa: PLC0415 - see above
        from peft.utils.other import AuxiliaryTrainingWrapper  # noqa: PLC0415 - see above

        named = model.named_parameters(remove_duplicate=False)
        counts = Counter(id(parameter) for _, parameter in named)
        for name in _outermost(
            model, lambda _, part: isinstance(part, (BaseTunerLayer, AuxiliaryTrainingWrapper))
        ):
            layer: Any = model.get_submodule(name)
            if any(counts[id(each)] > 1 for each in layer.parameters()):
                raise ConfigError(
                    f"export.merge=true: the weight of {name} is another layer's, too, which would "
                    "change with it: leave export.merge out"
                )
            if isinstance(layer, AuxiliaryTrainingWrapper):
                plain = layer.unload_and_optionally_merge_module(True, True, None)
            else:
                try:
                    # Refuses a sum that is not finite, as fp16 has it beyond 65,504.
                    layer.merge(safe_merge=True)
                except (RuntimeError, ValueError, NotImplementedError) as error:  # as of a bias
                    text = f"peft cannot merge {name}: {' '.join(str(error).split())}"
                    raise ConfigError(f"export.merge=true: {text} Leave it out") from error
                plain = layer.get_base_layer()
            model.set_submodule(name, plain)
        del model.peft_config
        return model


def _last_name(path: str) -> str:
    """Give a model's name without its folder or organisation, which may change."""
    return Path(hub_name(path) or Path(path).resolve()).name


def _words(config: Any) -> TaskWords:  # noqa: ANN401 - a LoraConfig
    """Give what stands for the task of an adapter; without one peft knows nothing of the model."""
    for words in TASKS.values():
        if words.peft is not None and words.peft == config.task_type:
            return words
    return TaskWords(objective="")


def _config_of(model: nn.Module) -> Any:  # noqa: ANN401 - a LoraConfig
    return vars(model)["peft_config"][_NAME]


def _widen(model: nn.Module, config: Any) -> None:  # noqa: ANN401 - a LoraConfig
    """Give the matrices fp32 where their layers have less, in which small updates are lost.

    What is drawn is drawn again in that dtype: peft draws it in fp32, casts it to the layer's
    dtype, which rounds it, and on the meta device does neither.
    """
    from peft.tuners.lora import LoraLayer  # noqa: PLC0415 - see above
    from peft.tuners.tuners_utils import cast_adapter_dtype  # noqa: PLC0415 - see above

    cast_adapter_dtype(model, _NAME)
    if config.init_lora_weights in _DRAWN:
        for part in [*model.modules()]:
            if not isinstance(part, LoraLayer):
                continue
            layer: Any = part
            base = next(layer.get_base_layer().parameters())
            for matrices in (layer.lora_A, layer.lora_B):
                matrices.to(torch.promote_types(base.dtype, torch.float32))
            layer.reset_lora_parameters(_NAME, config.init_lora_weights)


def _refuse_unmatched(key: str, wanted: str | Collection[str] | None, names: list[str]) -> None:
    """Refuse names that no module has, and patterns that none matches."""
    if isinstance(wanted, str):
        try:
            is_matched = wanted == _ALL or any(re.fullmatch(wanted, name) for name in names)
        except re.error as error:
            raise ConfigError(f"adapter.{key}={wanted}: no regular expression: {error}") from error
        if not is_matched:
            text = f"no module's whole name matches this pattern; for ends of names, [{wanted}]"
            raise ConfigError(f"adapter.{key}={wanted}: {text}")
        return
    for each in wanted or ():
        if not any(f".{name}".endswith(f".{each}") for name in names):
            ends = dict.fromkeys(name.rpartition(".")[2] for name in names)
            # A number is that of a layer in a list, and no name to type.
            words = [end for end in ends if not end.isdecimal()]
            near = did_you_mean(each, words) or f" It has {first_of(words)}"
            raise ConfigError(f"adapter.{key}={show(each)}: no module is named so.{near}")


def _outermost(model: nn.Module, fits: Callable[[str, nn.Module], bool]) -> list[str]:
    """Name the modules that fit and lie in none that does."""
    found = list[str]()
    for name, part in model.named_modules():
        if not any(name.startswith(f"{each}.") for each in found) and name and fits(name, part):
            found.append(name)
    return found


def _new_modules(model: nn.Module) -> list[str]:
    """Name the outermost modules whose parameters were all in none of the model's files."""
    new = {*facts_of(model).new}

    def is_new(name: str, part: nn.Module) -> bool:
        own = {f"{name}.{each}" for each, _ in part.named_parameters()}
        return bool(own) and own <= new

    return _outermost(model, is_new)


def _in_files(model: nn.Module) -> dict[str, Tensor]:
    """Give what is stored of an adapted model, by the names that peft gives it in files."""
    from peft import get_peft_model_state_dict  # noqa: PLC0415 - see above

    state = model.state_dict(keep_vars=True)
    found = get_peft_model_state_dict(model, state, _NAME, save_embedding_layers=False)
    return {f"{_PREFIX}{name}": tensor for name, tensor in found.items()}


def switch_of(model: nn.Module) -> Callable[[], AbstractContextManager[None]] | None:
    """Give what switches an adapter off; None where there is none, or it changed what it is on."""
    config = vars(model).get("peft_config", {}).get(_NAME)
    # Other first weights are taken out of the layer's own, or are not 0.
    if config is None or config.init_lora_weights not in _DRAWN:
        return None
    return partial(_switched_off, model)


@contextmanager
def _switched_off(model: nn.Module) -> Iterator[None]:
    """Compute without the adapter; peft's own switch would change what is trained, too."""
    parts = [part for part in model.modules() if hasattr(part, "disable_adapters")]
    for part in parts:
        vars(part)["_disable_adapters"] = True
    try:
        yield
    finally:
        for part in parts:
            vars(part)["_disable_adapters"] = False
