"""Every test of a feature stands, as those of the command line, in an empty folder of its own."""

import pytest


@pytest.fixture(autouse=True)
def _in_own_folder(own_folder):
    pass
