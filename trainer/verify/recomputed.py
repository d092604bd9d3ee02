"""Compare the planned step with the same one in which no block computes itself again."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.core.tensors import bits_of
from trainer.models.recompute import recompute_nothing, recomputes
from trainer.verify.case import Case
from trainer.verify.comparison import Errors, Gradient
from trainer.verify.find_module import NamedReasons, Reason

REASON = Reason(
    "comes out otherwise as its forward runs again in backward (activation_checkpointing): make "
    "what it writes a buffer (register_buffer), or type activation_checkpointing=false"
)


def check_recomputed(
    case: Case, errors: Errors, rest: Errors
) -> tuple[Errors, Errors, NamedReasons]:
    """Compare gradients and buffers, in the same cut; where they differ, name modules.

    Errors so found, of gradients or buffers, take the place of those that are given.
    """
    if not recomputes(case.module):
        return errors, rest, []
    plain = case.written(recompute_nothing)
    found = _errors(case, case.written(), plain)
    # What differs from run to run, such as ungoverned draws, is not due to recomputation.
    if found.is_exact or not _errors(case, case.written(recompute_nothing), plain).is_exact:
        return errors, rest, []
    wrong = {n for n, error in found.by_name.items() if error > found.limits[n]}
    buffers = [n for n, _ in case.module.named_buffers() if n in wrong]
    # Without one it is the last module with another gradient: backward begins there.
    names = buffers or [n for n, _ in case.module.named_parameters() if n in wrong][-1:]
    return found, found, [(n, REASON) for n in dict.fromkeys(map(_owner, names))]


def _owner(name: str) -> str:
    return name.rpartition(".")[0] or name


def _errors(case: Case, found: Gradient, plain: Gradient) -> Errors:
    # Equal bits are left out: between two infinities, as in a mask, there is no difference.
    names = [n for n in {**plain, **found} if not _is_same(plain.get(n), found.get(n))]
    return case.errors(*({n: side[n] for n in names if n in side} for side in (found, plain)))


def _is_same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None or one.shape != other.shape:
        return False
    return torch.equal(bits_of(one), bits_of(other))
