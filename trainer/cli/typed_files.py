"""Say which setting takes a file or folder that was typed alone, as other programs take it."""

from __future__ import annotations

import ast
import os
import shlex
from contextlib import suppress
from pathlib import Path

from trainer.config.messages import near_file
from trainer.core.format import expanded
from trainer.core.run_folder import RunFolder

_RECORDS = (".jsonl", ".json", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow")


def setting_of_file(word: str) -> str:
    """Give the setting for a path, such as `recipe=my.yaml`; empty where nothing is meant."""
    path = expanded(word)
    # A key has a dot, too.
    if not os.path.exists(path):  # noqa: PTH110 - of pathlib it raises for long names
        if "." not in word or (near := near_file(word)) is None:
            return ""
        path = Path(near)
    typed = shlex.quote(str(path))
    if path.suffix == ".yaml":
        return f"recipe={typed}"
    if path.suffix == ".py":
        return f"model._target_={_class_of(path)}"
    if (path / RunFolder.HYDRA).is_dir():
        return f"resume={typed}"
    if (path / "config.json").is_file():
        return f"model=hf model.path={typed}"
    kind = "hf" if path.suffix.lower() in _RECORDS else "text"
    return f"data={kind} data.path={typed}"


def _class_of(path: Path) -> str:
    """Give the import path of the first model in a file, else that of a class to be named."""
    module = ".".join(path.with_suffix("").parts)
    with suppress(OSError, SyntaxError, ValueError):
        for each in ast.parse(path.read_bytes()).body:
            if isinstance(each, ast.ClassDef):
                bases = [ast.unparse(base) for base in each.bases]
                if any(base.endswith("Module") for base in bases):
                    return f"{module}.{each.name}"
    return f"{module}.CLASS"
