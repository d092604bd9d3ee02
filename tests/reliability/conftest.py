"""The harnesses' own disk: real files, no waiting for the hardware."""

from collections.abc import Iterator

import pytest

from tests.reliability.faults import FaultyDisk
from trainer.core import durable


@pytest.fixture(autouse=True)
def unsynced_disk() -> Iterator[None]:
    with durable.use(FaultyDisk()):
        yield
