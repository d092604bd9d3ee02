"""Docstrings and code of this machine's standard library as pairs, and two small towers for them.

`recipes/two_towers.yaml` trains them: which of all functions is the one that a docstring is of?
"""

from __future__ import annotations

import ast
import inspect
import re
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

VOCABULARY = 16_384  # hashed words; 0 is padding
WORDS = {"query": 64, "document": 192}  # at most, of a docstring and of its code
LEAST = 40  # characters of a docstring
Function = ast.FunctionDef | ast.AsyncFunctionDef


def pairs(root: Path) -> Iterator[tuple[str, str]]:
    """Yield the docstring of each function below a folder, once, and its code without it."""
    seen = set[str]()
    for file in sorted(root.rglob("*.py")):
        if {"site-packages", "test", "tests", "idle_test"} & {*file.relative_to(root).parts}:
            continue
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if not isinstance(node, Function):
                continue
            text = inspect.cleandoc(ast.get_docstring(node) or "")
            if len(text) >= LEAST and len(node.body) > 1 and text not in seen:
                seen.add(text)
                node.body = node.body[1:]
                yield text, ast.unparse(node)


def words(text: str, most: int) -> Tensor:
    """Hash the words of a text, in lower case and split as in `readLine` and `read_line`."""
    found = re.findall(r"[A-Z]?[a-z]+|[A-Z]+|\d+", text)[:most]
    ids = [1 + zlib.crc32(word.lower().encode()) % (VOCABULARY - 1) for word in found]
    return torch.tensor(ids + [0] * (most - len(ids)), dtype=torch.int32)


class Pairs:
    """`query` is a docstring and `document` its code: `(64,)` and `(192,)` ids of words."""

    draws_randomness = False

    def __init__(self) -> None:
        texts = [*pairs(Path(sysconfig.get_path("stdlib")))]
        self.samples = [
            {name: words(text, WORDS[name]) for name, text in zip(WORDS, pair, strict=True)}
            for pair in texts
        ]
        self.lengths = np.broadcast_to(np.int64(1), (len(texts),))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        """Give one pair."""
        return self.samples[i]


class Towers(nn.Module):
    """Embeds each side by the mean of its words and a small network of its own."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(VOCABULARY, width, mode="mean", padding_idx=0)
        self.sides = nn.ModuleDict(
            {
                name: nn.Sequential(
                    nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU()
                ).append(nn.Linear(4 * width, width))
                for name in WORDS
            }
        )
        self.logit_scale = nn.Parameter(torch.tensor([2.66]))  # log(1 / 0.07); learnt

    def forward(self, query: Tensor, document: Tensor) -> dict[str, Tensor]:
        """Embed ids of words, `(samples, words)`, to `(samples, width)`."""
        given = {"query": query, "document": document}
        return {name: self.sides[name](self.words(ids)) for name, ids in given.items()}
