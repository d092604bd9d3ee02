"""Build what loads the samples of training and of evaluations."""

from __future__ import annotations

from multiprocessing import current_process

from torch import nn

from trainer.assemble.hardware import planned_device
from trainer.config.run_config import RunConfig
from trainer.core.errors import ConfigError
from trainer.core.world import World
from trainer.data.collate import LABELS
from trainer.data.loader import Loader
from trainer.data.samples import INPUT_IDS
from trainer.data.split import OWN_PART
from trainer.data.view import DataView
from trainer.models.check import vocabulary_of
from trainer.models.facts import facts_of
from trainer.plan.cut import Layout
from trainer.training.data import HeldOut

GPU_WORKERS = 4  # loading processes for a rank on a GPU where nobody says; none on a CPU


def open_loader(config: RunConfig, world: World, data: DataView) -> Loader:
    """Load what is trained on."""
    is_daemon, num_workers = current_process().daemon, config.num_workers
    if num_workers == "auto":
        on_gpu = planned_device(config, world).type != "cpu"
        num_workers = GPU_WORKERS if on_gpu and not is_daemon else 0
    if num_workers and is_daemon:
        text = "a daemon process, as this one, may start none; type num_workers=0"
        raise ConfigError(f"num_workers={num_workers}: {text}")
    pin_memory = world.device.type != "cpu"
    loader = Loader(data, num_workers=num_workers, seed=config.seed, pin_memory=pin_memory)
    loader.augment_with(data.facts.augment)
    return loader


def fit_loader(loader: Loader, module: nn.Module) -> None:
    """Load for a model: what it cannot take is refused."""
    if facts_of(module).has_targets:
        loader.leave_unaligned({LABELS})
    if (rows := vocabulary_of(module)) is not None:
        loader.limit({INPUT_IDS: rows})
    _check_positions("data", loader, module)


def _check_positions(key: str, loader: Loader, module: nn.Module) -> None:
    """Refuse samples that are longer than the model has positions."""
    positions = facts_of(module).max_positions
    if positions is None or not len(loader.dataset):
        return
    ids = loader.load(loader.longest()).get(INPUT_IDS)
    if ids is not None and ids.shape[-1] > positions:
        raise ConfigError(
            f"{key}.max_length: samples have up to {ids.shape[-1]} tokens, and "
            f"{type(module).__name__} has {positions} positions; type {key}.max_length={positions}"
        )


def held_out_loader(
    config: RunConfig, name: str, data: DataView, loader: Loader, layout: Layout, module: nn.Module
) -> HeldOut:
    """Load held-out samples as those of training are; no processes where a thread may do it."""
    own, most = loader.of(data, num_workers=0), config.eval.samples
    key = f"eval.sets.{name}" if name in config.eval.sets else "data"
    _check_positions(key, own, module)
    sizes = dict[str, int]()
    # The run's own part joins those of its sources.
    if name == OWN_PART:
        for source, ids in data.sources.items():
            if len(ids):
                sizes[source] = len(ids)
    if most and sizes:
        most = sum(min(most, size) for size in sizes.values())
    # A thread would seed the generators that training draws from.
    if own.draws_randomness:
        own = loader.of(data, loader.num_workers)
    return HeldOut(
        loader=own,
        lengths=data.lengths,
        layout=layout,
        max_tokens=1,  # until it is planned
        most=most,
        joins=(*sizes,),
        is_ordered=config.deterministic == "layout",
    )
