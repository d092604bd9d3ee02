"""Programs of a cluster, each started once for a file of tests, where they are installed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lib.cluster import Hosts, missing, real_slurm, two_hosts


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """A Slurm of two nodes."""
    if lacking := missing("hosts", "slurm"):
        pytest.skip(lacking)
    with real_slurm(tmp_path_factory.mktemp("slurm")) as hosts:
        yield hosts


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    """Two hosts that see each other."""
    if lacking := missing("hosts"):
        pytest.skip(lacking)
    with two_hosts(tmp_path) as made:
        yield made
