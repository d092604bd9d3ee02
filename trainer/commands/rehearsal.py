"""What shows only when the user's own objective and optimizer run, once, before training."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

import torch

from trainer.assemble import Parts
from trainer.culprits.hooks import hooked
from trainer.data.loader import Request
from trainer.errors import ConfigError
from trainer.micro_batch import to_device
from trainer.objectives.base import Objective
from trainer.tune.untouched import untouched

TOLERANCE = 0.02
"""Relative; sums in bf16 over different shapes differ by less, a mean by a half."""


def rehearse_own(parts: Parts) -> Iterator[str]:
    """Run the classes of the user's own that decide whether a step can be cut at all.

    Not collective; the model, whole and on its device, is left bit for bit as it was.

    Args:
        parts: before the model is laid out over ranks.

    Yields:
        One line for each thing a user should know.

    Raises:
        ConfigError: the optimizer steps within backward, or the objective does not weigh what it
            sums.
    """
    if any(p.is_meta for p in parts.module.parameters()):
        return
    for name, method in list(hooked(parts.module).items())[:1]:
        yield (
            f"{name} has a hook on its gradient ({method}), which runs for every micro-batch, not "
            "once a step: what does more than scale by a constant, an optimizer's step above all, "
            "makes the step depend on its cut; train verify tells"
        )
    kind = getattr(parts.spec, "kind", type(parts.spec))
    if kind.__module__.partition(".")[0] not in {"trainer", "torch"}:
        _refuse_steps_in_backward(parts)
    if type(parts.objective).__module__.partition(".")[0] != "trainer":
        # What fails on so few samples fails again, and is told, where it is really needed.
        with suppress(RuntimeError, ValueError, IndexError):
            yield from _coupling(parts)


def _coupling(parts: Parts) -> Iterator[str]:
    """Compare sums and weights of two groups of samples together with those of each alone.

    Yields:
        A line for a loss, and one for a weight, that is no sum over samples.
    """
    size, order = parts.objective.group_size, parts.source.order
    ids = order.next(order.start).ids
    with untouched(parts.module, parts.objective), torch.no_grad():
        parts.module.eval()
        _sums(parts, ids[:size].tolist())
    if parts.objective.scope != "sample" or len(ids) < 2 * size:
        return
    with untouched(parts.module, parts.objective), torch.no_grad():
        parts.module.eval()
        together = _sums(parts, ids[: 2 * size].tolist())
        first, second = (_sums(parts, part.tolist()) for part in (ids[:size], ids[size : 2 * size]))
    name, groups = type(parts.objective).__name__, "samples" if size == 1 else "groups"
    for kind, term in together:
        whole, apart = together[kind, term], first[kind, term] + second[kind, term]
        if not math.isclose(whole, apart, rel_tol=TOLERANCE, abs_tol=1e-6):
            yield (
                f"objective: {kind} {term} of {name} is {whole:.4g} for two {groups} together and "
                f"{apart:.4g} for both apart, so the step depends on the cut: sum over samples and "
                "divide by nothing; train verify tells how far it is off"
            )


def _sums(parts: Parts, ids: Sequence[int]) -> dict[tuple[str, str], float]:
    lengths = parts.source.lengths[list(ids)]
    length = int(lengths.sum() if parts.layout.packed else lengths.max())
    request = Request(ids=tuple(ids), epoch=0, pad_to=length, packed=parts.layout.packed)
    fields = parts.source.loader.load(request)
    given = parts.objective.sums(parts.call, to_device(fields, parts.world.device))
    found, weights = given.losses, parts.objective.weights(fields)
    _refuse_unweighted(parts.objective, [*found, *given.metrics], weights)
    sums = {("loss", name): float(loss) for name, loss in found.items()}
    return sums | {("weight", name): float(weights[name]) for name in found}


def _refuse_unweighted(
    objective: Objective, names: Sequence[str], weights: Mapping[str, float]
) -> None:
    """Compare what an objective sums with what it weighs.

    Raises:
        ConfigError: a sum has nothing to be divided by.
    """
    missing = [name for name in names if name not in weights]
    if missing:
        kind = type(objective).__name__
        raise ConfigError(
            f"objective: weights of {kind} gives {', '.join(weights) or 'nothing'}, but no "
            f"{', '.join(missing)}, which sums gives: return what each is divided by"
        )


def _refuse_steps_in_backward(parts: Parts) -> None:
    """Build the optimizer over fakes of the parameters, and look for hooks it leaves on them.

    Raises:
        ConfigError: there are some.
    """
    from trainer.tune.fake import CannotRunFake, run_fake  # noqa: PLC0415 - half a second

    found: list[str] = []

    def build(_: object) -> None:
        parts.spec.build(parts.module)
        found.extend(hooked(parts.module))

    # One that needs values cannot be looked at.
    with suppress(CannotRunFake):
        run_fake(parts.module, build)
    if found:
        raise ConfigError(
            f"optimizer._target_={parts.config.optimizer.target}: steps within backward (a hook on "
            f"{found[0]}), so every micro-batch would be a step of its own; use one that waits "
            "for step()"
        )
