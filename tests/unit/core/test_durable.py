"""Writes that survive a crash; their harnesses are in `tests/reliability`."""

import json

from trainer.core import durable


def test_json_holds_null_for_what_is_not_finite(tmp_path):
    content = {"loss": float("nan"), "more": [float("inf"), (1.5, "text")], "deep": {"x": -1e400}}
    durable.write_json(tmp_path / "result.json", content)
    found = json.loads((tmp_path / "result.json").read_bytes())
    assert found == {"loss": None, "more": [None, [1.5, "text"]], "deep": {"x": None}}
