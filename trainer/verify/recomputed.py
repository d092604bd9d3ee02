"""Compare the planned step with the same one in which no block computes itself again."""

from __future__ import annotations

import torch

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
    wrong = {n for n, error in found.by_name.items() if error > found.limit}
    buffers = [n for n, _ in case.module.named_buffers() if n in wrong]
    # Without one it is the last module with another gradient: backward begins there.
    names = buffers or [n for n, _ in case.module.named_parameters() if n in wrong][-1:]
    owners = dict.fromkeys(n.rpartition(".")[0] or n for n in names)
    return found, found, [(owner, REASON) for owner in owners]


def _errors(case: Case, found: Gradient, plain: Gradient) -> Errors:
    # Equal bits are left out: between two infinities, as in a mask, there is no difference.
    both = found.keys() & plain.keys()
    equal = {n for n in both if torch.equal(bits_of(found[n]), bits_of(plain[n]))}
    sides = ({n: g for n, g in side.items() if n not in equal} for side in (found, plain))
    return case.errors(*sides)
