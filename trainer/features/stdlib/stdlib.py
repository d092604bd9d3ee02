"""Read real text without a download: the source of the running Python's standard library."""

from __future__ import annotations

import ast
import io
import os
import sys
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import final

from trainer.config.components import Overlong, Pair, Share
from trainer.core.errors import DataError
from trainer.data.documents import ByteDocuments
from trainer.data.files import progress
from trainer.data.index import Add, Index, cached_index
from trainer.data.split import HOLDOUT

_LEFT_OUT = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
)
"""Tests, which not every Python ships, and what is no part of the library."""


@final
class StdlibText(ByteDocuments):
    """One document per top-level function or class of the standard library, decorators included.

    A document is the exact source segment, in UTF-8. Test folders are left out; so are files
    that do not decode or parse, which are counted as skipped. Training and held-out documents are
    split by module (file), so that no module is on both sides. See `ByteDocuments` for the
    tokens.

    Args:
        split: `train` or `held_out`.
        max_length: most tokens of a sample, BOS and EOS counted.
        holdout: share of the modules that is held out.
        seed: selects which.
        overlong: what becomes of longer documents.
        root: folder of the library; the running Python's own by default.

    Raises:
        DataError: this Python ships without source, or no document is left to train on.
    """

    _split_rule = "whole modules, drawn by data.split_seed"

    def __init__(
        self,
        split: str = "train",
        max_length: Pair = 256,
        holdout: Share = HOLDOUT,
        seed: int = 0,
        overlong: Overlong = "chunk",
        root: str | None = None,
    ) -> None:
        folder = Path(root or sysconfig.get_path("stdlib")).absolute()
        super().__init__(_stdlib_index(folder), split, max_length, holdout, seed, overlong)


def _stdlib_index(root: Path) -> Index:
    modules = sorted(_modules(root))

    def build(add: Add) -> tuple[list[str], dict[str, str]]:
        label = "indexing the Python standard library"
        num_documents, skipped = 0, list[str]()
        with progress(label, len(modules), "module") as advance, warnings.catch_warnings():
            # Old modules hold escapes and literals that newer parsers warn about.
            warnings.simplefilter("ignore")
            for name in modules:
                try:
                    for document in top_level_definitions((root / name).read_bytes()):
                        add(document, name.encode())
                        num_documents += 1
                # A null byte is a ValueError, as is what does not decode.
                except (OSError, SyntaxError, ValueError, RecursionError) as error:
                    skipped.append(f"{name}: {error}")
                advance()
        if num_documents == 0:
            raise DataError(
                f"data=stdlib: no Python source below {root}; use data=text data.path=FILE"
            )
        return skipped, {}

    states = {name: (root / name).stat() for name in modules}
    return cached_index("stdlib", str(root), states, build, reader=sys.version)


def _modules(root: Path) -> Iterator[str]:
    """Walk the library; yields its source files, relative to `root`, with forward slashes."""
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _LEFT_OUT]
        for name in files:
            path = Path(folder, name)
            # Distributions link into /etc, where slim images hold nothing.
            if name.endswith(".py") and path.is_file():
                yield path.relative_to(root).as_posix()


def top_level_definitions(source: bytes) -> list[bytes]:
    """Cut the functions and classes at top level out of a module, decorators included."""
    encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
    text = source.decode(encoding)
    lines, documents = text.encode().splitlines(keepends=True), []
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            # At top level both they and their decorators begin a line.
            begin = min(each.lineno for each in (node, *node.decorator_list)) - 1
            *whole, last = lines[begin : node.end_lineno]
            documents.append(b"".join([*whole, last[: node.end_col_offset]]))
    return documents
