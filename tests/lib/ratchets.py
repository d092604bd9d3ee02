"""Measure the size and the density of the code: `python -m tests.lib.ratchets` writes the figures.

They may only fall: `tests/test_architecture.py` compares them with `tests/ratchets.json`.
"""

import ast
import io
import json
import re
import tokenize
from collections import Counter
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).parents[2]
RATCHETS = CHECKOUT / "tests" / "ratchets.json"
MOST_IMPORTS = 15  # modules of ours that one imports; more are listed
NAMED = {"BatchNorm": r"batch_?norm", "transformers": r"transformers", "noise": r"noise"}
COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
NO_CODE |= {tokenize.ENCODING, tokenize.ENDMARKER}


def sources(folder: str = "trainer") -> dict[str, str]:
    """Read every file of Python below a folder of the checkout."""
    files = sorted((CHECKOUT / folder).rglob("*.py"))
    return {str(path.relative_to(CHECKOUT)): path.read_text() for path in files}


def measured() -> dict[str, dict[str, float]]:
    """Measure everything that may only fall."""
    package = sources()
    rooms = Counter[str]()
    for name, text in package.items():
        rooms[name.split("/")[1].removesuffix(".py")] += len(text.splitlines())
    features = rooms.pop("features")
    imports = {name: len(set(imported(text, package))) for name, text in package.items()}
    nodes = [node for text in package.values() for node in ast.walk(ast.parse(text))]

    def per_100(kind: Any) -> float:
        statements = sum(isinstance(node, ast.stmt) for node in nodes)
        return round(100 * sum(isinstance(node, kind) for node in nodes) / statements, 1)

    return {
        "lines": {
            "engine": rooms.total(),
            "features": features,
            "all": rooms.total() + features,
            "code": sum(map(lines_of_code, package.values())),
            "tests": sum(len(text.splitlines()) for text in sources("tests").values()),
        },
        "lines of a room": dict(sorted(rooms.items())),
        "files that name": {
            word: sum(bool(re.search(pattern, text, re.IGNORECASE)) for text in package.values())
            for word, pattern in NAMED.items()
        },
        "imports of ours": {name: n for name, n in imports.items() if n > MOST_IMPORTS},
        "per 100 statements": {
            "comprehensions": per_100(COMPREHENSIONS),
            "conditional expressions": per_100(ast.IfExp),
        },
    }


def imported(text: str, package: dict[str, str]) -> list[str]:
    """Name the modules of ours that a file imports, also within functions."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("trainer."):
            path = str(node.module).replace(".", "/")
            inner = {f"{path}/{alias.name}.py" for alias in node.names} & package.keys()
            found += sorted(inner) or [f"{path}.py"]
    return found


def lines_of_code(text: str) -> int:
    """Count the lines that are no blank, comment, docstring or import."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {
        line
        for token in tokens
        if token.type not in NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(text)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text or isinstance(node, ast.Import | ast.ImportFrom):
            lines -= {*range(node.lineno, (node.end_lineno or 0) + 1)}
    return len(lines)


if __name__ == "__main__":
    RATCHETS.write_text(json.dumps(measured(), indent=1) + "\n")
