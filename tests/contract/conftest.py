"""A run puts the current folder on the path; here it leaves with the test."""

import sys

import pytest


@pytest.fixture(autouse=True)
def _path_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
