"""Offer every optimizer of PyTorch as an option: `optimizer=radam optimizer.lr=1e-3`.

Names and arguments are read from PyTorch's source, as its import takes seconds.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

GROUP, LIBRARY = "optimizer", "torch.optim"

_IMPORT = re.compile(r"^from torch\.optim\.(\w+) import (\w+) as \2$", re.MULTILINE)
_UNFIT: Mapping[str, str] = {
    "Optimizer": "is the base class; type the name of an optimizer",
    "LBFGS": "evaluates the loss many times in a step, which is one gradient here; type "
    "optimizer=adamw or sgd",
    "SparseAdam": "takes sparse gradients alone, which are not reduced or saved here; type "
    "optimizer=adam",
}
"""Classes of `torch.optim` that take no step here, and what to type instead."""


def names() -> list[str]:
    """Name the options, in small letters."""
    return sorted(name.lower() for name in _files() if name not in _UNFIT)


def why_unfit(name: str) -> str | None:
    """Say why a class, by its name in any case or its import path, is no option."""
    module, _, name = name.lower().rpartition(".")
    unfit = {each.lower(): why for each, why in _UNFIT.items()}
    return unfit.get(name) if module in ("", LIBRARY) else None


@cache
def _files() -> Mapping[str, Path]:
    """Give the file of each class that PyTorch exports."""
    spec = find_spec("torch")  # which is not imported by that
    folders = (spec and spec.submodule_search_locations) or ()
    init = next((Path(each) / "optim" / "__init__.py" for each in folders), None)
    text = init.read_text() if init is not None and init.is_file() else ""
    return {name: Path(str(init)).with_name(f"{file}.py") for file, name in _IMPORT.findall(text)}


def option(name: str) -> dict[str, Any]:
    """Give the class of an option, and the defaults of its arguments."""
    kind = next(each for each in _files() if each.lower() == name)
    tree = ast.parse(_files()[kind].read_text())
    found = (each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == kind)
    inits = (each for node in found for each in node.body if isinstance(each, ast.FunctionDef))
    arguments = next(each.args for each in inits if each.name == "__init__")
    shared: dict[str, Any] = {"groups": {}, "layer_decay": None}
    return {"_target_": f"{LIBRARY}.{kind}", **shared, **dict(_defaults(arguments))}


def _defaults(arguments: ast.arguments) -> Iterator[tuple[str, Any]]:
    """Give the arguments whose defaults are plain values; whole numbers may stand for others."""
    usual = arguments.args[len(arguments.args) - len(arguments.defaults) :]
    given = [*zip(usual, arguments.defaults, strict=True)]
    given += [(a, d) for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d]
    for argument, default in given:
        with suppress(ValueError):  # of a name, which is the module's own
            value = ast.literal_eval(default)
            is_real = "float" in ast.unparse(argument.annotation or default)
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            yield argument.arg, float(value) if is_real and is_whole else value
