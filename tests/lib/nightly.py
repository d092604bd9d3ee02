"""The words that put a test into a tier: what has none of them is run by README's command.

A promise is shown there once, in its cheapest case. `slow` shows it at more places and in more
cases, and `.ci/run` runs that too. `nightly` is what takes many minutes: full counts of harnesses,
every rank and phase, the daemons of a cluster.
"""

from typing import Any

import pytest

LIMIT_S = 7200


def slow(*values: Any) -> Any:
    """Values of `parametrize` that repeat what others of its list show; see `pytest.mark.slow`."""
    return pytest.param(*values, marks=pytest.mark.slow)


def nightly(*values: Any) -> Any:
    """Values of `parametrize` that repeat it once more, too many or too long for every commit."""
    return pytest.param(*values, marks=[pytest.mark.nightly, pytest.mark.timeout(LIMIT_S)])


def counts(default: Any, full: int) -> pytest.MarkDecorator:
    """Give a harness its `count` of cases: few, maybe `slow(...)`, and all nightly."""
    return pytest.mark.parametrize("count", [default, nightly(full)])
