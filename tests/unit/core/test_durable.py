"""Writes that survive a crash; their harnesses are in `tests/reliability`."""

from __future__ import annotations

import json
from pathlib import Path

from trainer.core import durable


def test_json_holds_null_for_what_is_not_finite(tmp_path: Path) -> None:
    content = {"loss": float("nan"), "more": [float("inf"), (1.5, "text")], "deep": {"x": -1e400}}
    durable.write_json(tmp_path / "result.json", content)
    found = json.loads((tmp_path / "result.json").read_bytes())
    assert found == {"loss": None, "more": [None, [1.5, "text"]], "deep": {"x": None}}
