"""Resolve `precision`, by what was typed, the checkpoint and the hardware; bind models to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from trainer.assemble.parallel import planned_device
from trainer.config.cards import card_of
from trainer.config.run_config import RunConfig
from trainer.core import gpu
from trainer.core.errors import ConfigError
from trainer.core.world import World
from trainer.models.bind import AUTOCAST, bind
from trainer.objectives.base import ModelCall


def resolve_precision(
    config: RunConfig, world: World, module: nn.Module, recorded: Mapping[str, Any] | None = None
) -> str:
    """Resolve `precision` on the main rank; the others follow. Collective.

    `auto` is what a run has been computing in, on whatever hardware it goes on. For a run that
    begins it is bf16 where the hardware is made for it, and fp32 elsewhere and for models without a
    weight in fp32, which autocast would not reach.
    `recorded` is the contract of the checkpoint that is read; None where there is none.

    Raises:
        ConfigError: this hardware does not have it.
    """

    def resolve() -> str:
        device, begun = planned_device(config, world), (recorded or {}).get("precision")
        word: str = config.precision
        if word == "auto":
            has_fp32 = any(p.dtype == torch.float32 for p in module.parameters())
            card = card_of(config.device)
            has_bf16 = has_fast_bf16(device) if card is None else card.has_bf16
            word = begun or ("bf16" if has_fp32 and has_bf16 else "fp32")
        if word == "tf32" and device.type == "cpu":
            remedy = " resume_allow=[precision]" * (begun is not None)
            raise ConfigError(f"precision=tf32: needs a GPU; type precision=fp32{remedy}")
        if word == "fp16" and any(p.dtype == torch.float16 for p in module.parameters()):
            raise ConfigError("precision=fp16: the model's weights are fp16; give them in fp32")
        return word

    return world.on_main(resolve)


def has_fast_bf16(device: torch.device) -> bool:
    """Whether matrix products in bf16 have instructions of their own, as the hardware says.

    A GPU that is not here is taken for one that has them, as all have since 2020.
    """
    if gpu.is_gpu(device):
        return gpu.has_capability(device, 8, 0)
    flags = torch.cpu.get_capabilities()
    return bool(flags.get("amx_bf16") or flags.get("avx512_bf16"))


def set_matmul_precision(precision: str, device: torch.device) -> None:
    """Let a GPU compute products of fp32 tensors in TF32, in convolutions too, unless in fp32.

    Under autocast those are what a model or an objective takes out of it; TF32 has three bits more
    than bf16. On a CPU nothing is changed.
    """
    if gpu.is_gpu(device):
        torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
        torch.backends.cudnn.allow_tf32 = precision != "fp32"


def bind_run(module: nn.Module, precision: str, world: World) -> ModelCall:
    """Bind a module to the run's precision."""
    return bind(module, autocast=AUTOCAST.get(precision), device_type=world.device.type)
