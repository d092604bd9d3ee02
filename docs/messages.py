"""List every text of the package that a person may read: `python docs/messages.py`.

A template is a string of at least three words that is no docstring, with `{...}` where a value is
filled in. One line each, with its file and line, so that a reader who has not seen the code can
mark each one clear or unclear.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "trainer"
WORDS = 3
"""Strings of fewer words are keys, formats and names."""


def templates(path: Path) -> list[tuple[int, str]]:
    """Give the line and the text of every template of a module, in order."""
    tree = ast.parse(path.read_text())
    parts_of_others = {
        id(part)
        for node in ast.walk(tree)
        for part in ([node.value] if isinstance(node, ast.Expr) else getattr(node, "values", []))
        if isinstance(node, ast.Expr | ast.JoinedStr)
    }
    texts = [
        (node.lineno, " ".join(written(node).split()))
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr | ast.Constant) and id(node) not in parts_of_others
    ]
    return sorted(
        line_and_text for line_and_text in texts if len(line_and_text[1].split()) >= WORDS
    )


def written(node: ast.expr) -> str:
    """Give a string as it is written, with the source of what is filled in."""
    if isinstance(node, ast.JoinedStr):
        return "".join(written(part) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return "{" + ast.unparse(node.value) + "}"
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def main() -> None:
    """Print the list."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for line, text in templates(path):
            sys.stdout.write(f"{path.relative_to(PACKAGE.parent)}:{line}: {text}\n")


if __name__ == "__main__":
    main()
