"""The one switch between a run of the tests and the long ones, `pytest -m nightly`.

By default a promise is shown once; nightly runs show it again at more places and in more cases.
"""

from __future__ import annotations

from typing import Any

import pytest

LIMIT_S = 7200


def nightly(*values: Any) -> Any:
    """Values of `parametrize` that repeat what others of its list show."""
    return pytest.param(*values, marks=[pytest.mark.nightly, pytest.mark.timeout(LIMIT_S)])


def counts(default: int, full: int) -> pytest.MarkDecorator:
    """Give a harness its `count` of cases: few by default, all of them nightly."""
    return pytest.mark.parametrize("count", [default, nightly(full)])
