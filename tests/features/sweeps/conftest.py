"""Processes of joblib outlive a sweep, and stay in the folder of the first."""

from collections.abc import Iterator

import pytest
from joblib.externals.loky import get_reusable_executor


@pytest.fixture(autouse=True)
def no_processes_of_another_test(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "joblib" in request.node.name:
        get_reusable_executor().shutdown()
