"""Build a run as it begins, or as it goes on from a checkpoint."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self, final

from trainer.assemble.components import Components, assemble
from trainer.assemble.resumption import SavedCut, check_terms
from trainer.assemble.terms import Terms
from trainer.checkpoint.state import restore
from trainer.checkpoint.store import Loaded
from trainer.checkpoint.weights import StoredWeights, first_weights, load_step
from trainer.config.run_config import RunConfig
from trainer.core.errors import Preempted
from trainer.core.signals import UNBEGUN
from trainer.core.world import World
from trainer.training.consistency import check_consistency


@final
@dataclass(frozen=True, kw_only=True)
class Saved:
    """What a checkpoint says before the run is built; all empty where there is none."""

    loaded: Loaded | None
    terms: Terms = field(default_factory=Terms)
    cut: SavedCut = field(default_factory=SavedCut)

    @classmethod
    def read(cls, loaded: Loaded | None) -> Self:
        """Read it; nothing is laid out over the ranks."""
        saved = cls(loaded=loaded)
        if loaded is not None:
            restore(loaded, {"terms": saved.terms, "cut": saved.cut})
        return saved


def end_if_stopped(world: World, was_asked: bool) -> None:
    """End before the first step, by `Preempted`, if a signal asked any rank to. Collective."""
    if any(world.collect(was_asked)):
        raise Preempted(UNBEGUN)


def assemble_on_all(
    config: RunConfig, world: World, terms: Terms, stored: StoredWeights | None
) -> Components:
    """Build the same run on all ranks, unless a signal ends the reading of its data. Collective."""
    components: list[Components] = []
    with suppress(Preempted):
        components.append(assemble(config, world, terms, stored))
    end_if_stopped(world, not components)
    found = components[0]
    check_consistency(world, found.data_views, found.module, found.weights)
    return found


def assemble_resumed(
    config: RunConfig, world: World, *, with_values: bool = False
) -> tuple[Components, Loaded | None, SavedCut]:
    """Build a run as it begins, or goes on from the checkpoint that `resume` names.

    Gives its components, the checkpoint of its weights, where they are of one, and the cut that
    was saved; what a resumption refuses is refused. A plan leaves weights unread. `with_values` is
    as for `assemble`.
    """
    loaded, stored = None, None
    if config.resume is not None:
        loaded = load_step(Path(config.resume), config.step)
    saved = Saved.read(loaded)
    if config.command != "plan":
        # One process stands for all ranks.
        stored = first_weights(config, loaded, World(device=world.device))
    components = assemble(config, world, saved.terms, stored, with_values=with_values)
    check_terms(components, saved.terms)
    return components, loaded or (stored and stored.loaded), saved.cut
