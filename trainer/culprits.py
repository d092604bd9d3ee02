"""Names what couples the samples of a micro-batch: which modules, or the objective itself.

A few samples are run together and alone. A module is to blame when what goes into it agrees and
what comes out does not. It needs no knowledge of module types, so it finds capacity routing or
padding-sensitive layers as well as batch normalisation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from trainer.accumulate.base import seed_draws
from trainer.micro_batch import MicroBatch
from trainer.objectives.base import Objective, Sums
from trainer.parallel import Parallel
from trainer.world import rng_key

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


@final
@dataclass(frozen=True, slots=True)
class _Trace:
    """Inputs and outputs of every module call of one forward, in order of completion."""

    calls: dict[tuple[str, int], tuple[list[Tensor], list[Tensor]]]
    sums: Sums


def find_culprits(
    model: Parallel, objective: Objective, together: MicroBatch, alone: Sequence[MicroBatch]
) -> list[tuple[str, str]]:
    """Name the modules whose result for a sample depends on its micro-batch, with the reason.

    Args:
        model: a scratch copy; its buffers may change.
        objective: gives the sums, which must add up.
        together: a few samples of different length as one micro-batch.
        alone: the same samples in the same order, one each, without padding.
    """
    traced = _trace(model, objective, together, together.rng_key)
    redrawn = _trace(model, objective, together, rng_key(together.rng_key, "again"))
    single = [_trace(model, objective, m, together.rng_key) for m in alone]
    lengths = [m.num_positions for m in alone]
    modules = dict(model.module.named_modules())
    random = _blamed(traced, lambda call: _differ(traced.calls[call], redrawn.calls.get(call)))
    coupled = _blamed(
        traced,
        lambda call: _differs_alone(
            traced.calls[call], [s.calls.get(call) for s in single], lengths
        ),
    )
    found = [(name, _reason(modules[name], drawn=name in random)) for name in [*coupled, *random]]
    found = list(dict.fromkeys(found))
    return found or _objective_faults(objective, traced.sums, [s.sums for s in single])


def _trace(model: Parallel, objective: Objective, micro_batch: MicroBatch, key: int) -> _Trace:
    calls: dict[tuple[str, int], tuple[list[Tensor], list[Tensor]]] = {}
    with _recording(model.module, calls), torch.no_grad():
        seed_draws(key, next(model.module.parameters()).device)
        sums = objective.sums(model.call, micro_batch.fields)
    return _Trace(calls, sums)


@contextmanager
def _recording(
    module: nn.Module, calls: dict[tuple[str, int], tuple[list[Tensor], list[Tensor]]]
) -> Iterator[None]:
    def hook(name: str) -> Callable[..., None]:
        def record(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:  # noqa: ANN401
            index = sum(known == name for known, _ in calls)
            calls[name, index] = (_tensors([args, kwargs]), _tensors(output))

        return record

    handles = [
        part.register_forward_hook(hook(name), with_kwargs=True)
        for name, part in module.named_modules()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _tensors(value: Any) -> list[Tensor]:  # noqa: ANN401 - whatever a module takes or gives
    if isinstance(value, Tensor):
        return [value.detach().clone()]
    if isinstance(value, dict):
        return _tensors(list(value.values()))
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _blamed(trace: _Trace, differs: Callable[[tuple[str, int]], tuple[bool, bool]]) -> list[str]:
    """List the modules whose inputs agree and outputs differ, innermost only."""
    names = []
    for call in trace.calls:
        inputs, outputs = differs(call)
        if outputs and not inputs and call[0] not in names:
            names.append(call[0])
    return [
        n for n in names if not any(o != n and o.startswith(f"{n}." if n else "") for o in names)
    ]


def _differ(
    first: tuple[list[Tensor], list[Tensor]], second: tuple[list[Tensor], list[Tensor]] | None
) -> tuple[bool, bool]:
    """Compare inputs and outputs of the same call in two runs of the same micro-batch."""
    if second is None:
        return False, True
    return tuple(  # type: ignore[return-value] # two by construction
        any(a.shape != b.shape or not _close(a, b) for a, b in zip(x, y, strict=False))
        for x, y in zip(first, second, strict=True)
    )


def _differs_alone(
    together: tuple[list[Tensor], list[Tensor]],
    alone: Sequence[tuple[list[Tensor], list[Tensor]] | None],
    lengths: Sequence[int],
) -> tuple[bool, bool]:
    """Compare inputs and outputs of a call with those of the samples run alone."""
    result = []
    for side in (0, 1):
        differs = False
        for index, single in enumerate(alone):
            if single is None:
                return False, True
            pairs = zip(together[side], single[side], strict=False)
            differs |= any(
                not _same_sample(a, b, index, len(alone), lengths[index]) for a, b in pairs
            )
        result.append(differs)
    return result[0], result[1]


def _same_sample(whole: Tensor, alone: Tensor, index: int, count: int, length: int) -> bool:
    """Compare one sample's part of a tensor; what cannot be told apart by sample agrees."""
    if whole.dim() == 0 or alone.dim() != whole.dim():
        return True
    if whole.shape[0] != count and alone.shape[0] == length and whole.shape[0] % count == 0:
        whole = whole.reshape(count, -1, *whole.shape[1:])
        alone = alone.unsqueeze(0)
    if whole.shape[0] != count or alone.shape[0] != 1:
        return True
    mine, other = whole[index], alone[0]
    for dim in range(mine.dim()):
        size = min(mine.shape[dim], other.shape[dim])
        mine, other = mine.narrow(dim, 0, size), other.narrow(dim, 0, size)
    return _close(mine, other)


def _close(first: Tensor, second: Tensor) -> bool:
    if not first.is_floating_point():
        return bool(torch.equal(first, second))
    tolerance = TOLERANCE.get(first.dtype, 1e-2)
    finite = torch.isfinite(first) & torch.isfinite(second)
    first, second = first.where(finite, 0), second.where(finite, 0)
    scale = float(second.abs().max()) if second.numel() else 0.0
    return bool(((first - second).abs() <= tolerance * max(scale, 1e-30)).all())


def _reason(module: nn.Module, *, drawn: bool) -> str:
    kind = type(module).__name__
    if isinstance(module, _BatchNorm):
        return (
            f"{kind} normalises over the samples of its micro-batch; use GroupNorm or LayerNorm, "
            "or accum=fixed, where its groups are stated"
        )
    if isinstance(module, _DropoutNd) or drawn:
        return (
            f"{kind} draws at random per micro-batch: equal in distribution only; "
            "set its rate to 0 to compare bits"
        )
    return (
        f"{kind}: the output for a sample changes with its neighbours or its padding "
        "(capacity routing, statistics over the micro-batch, or attention to padding)"
    )


def _objective_faults(
    objective: Objective, together: Sums, alone: Sequence[Sums]
) -> list[tuple[str, str]]:
    """Check that the named sums add up over samples."""
    faults = []
    for name, whole in together.losses.items():
        parts = float(sum(s.losses[name].double() for s in alone))
        if abs(float(whole) - parts) > 1e-6 * max(abs(parts), 1e-12):
            faults.append(
                (
                    f"objective {type(objective).__name__}",
                    f"`{name}` is no sum: {len(alone)} samples together give {float(whole):.6g}, "
                    f"alone they add up to {parts:.6g}; it divides by a count of its own, or does "
                    "not divide where it should",
                )
            )
    return faults
