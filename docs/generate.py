"""Write the pages that the program itself gives: `python docs/generate.py`.

docs/configuration/ has a page for each group of keys, from the schema and the files of conf/;
docs/recipes.md is made of the files of recipes/.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, final

from trainer.config import trackers
from trainer.config.components import GROUPS
from trainer.config.keys import KEYS, docs_of
from trainer.config.messages import flat, show
from trainer.config.option_files import OWN, data_dir, load_yaml

DOCS = Path(__file__).parent
REST = "run"
"""The page of every key that no other page has."""

PAGES = {  # what the keys of each page decide, and the how-to pages that set them
    "run": ("how long a run is, where it is written, what it goes on from", "resume export"),
    "batch": ("how many samples or tokens stand behind a step", "batch-size"),
    "accum": ("how a step is cut into micro-batches", "fit-memory go-faster"),
    "sync": ("when ranks add up their gradients", "several-gpus"),
    "parallel": ("how many ranks there are, and what each holds", "several-gpus fit-memory"),
    "hardware": ("what the step is computed on, in which numbers", "precision go-faster"),
    "model": ("what is trained", "text pretrained-images own/model"),
    "tokenizer": ("how text becomes tokens", "text own/tokenizer"),
    "adapter": ("whether an adapter (LoRA) is trained beside a frozen model", "adapters"),
    "data": ("what is trained on, and what is held out", "formats data hold-out"),
    "objective": ("the loss", "text contrastive text-pairs preferences own/objective"),
    "optimizer": ("the update, clipping and averages of the weights", "learning-rate checkpoints"),
    "scheduler": ("the learning rate of each step", "learning-rate batch-size"),
    "batchnorm": ("over which samples BatchNorm normalises", "batchnorm"),
    "eval": ("when and on what a run is evaluated (validation)", "hold-out metrics"),
    "checkpoint": ("when a run is saved, and what is kept", "checkpoints"),
    "log": ("what a run writes down", "look-inside generate"),
    "stop": ("when a run ends early (early stopping)", "checkpoints"),
    "sweep": ("what ranks the jobs of a sweep", "sweep"),
    "logger": ("which trackers show the run: W&B, TensorBoard, MLflow", "trackers"),
    "own": ("code of yours that changes the model, watches or keeps state", "hooks own/index"),
}
MOVED = {
    **dict.fromkeys(("device", "network", "precision", "compile", "deterministic"), "hardware"),
    **dict.fromkeys(("activation_checkpointing", "num_workers", "profile"), "hardware"),
    **dict.fromkeys(("clip_norm", "ema.decay"), "optimizer"),
    **dict.fromkeys(("hooks", "parts", "transforms", "trust"), "own"),
}
"""Keys whose page is another than their first word says."""

HOW_TO = {  # of single keys, where the page of the group is another
    "steps": "learning-rate",
    "epochs": "learning-rate",
    "max_time": "resume",
    "seed": "sweep",
    "name": "find-runs",
    "outputs": "find-runs",
    "run": "find-runs",
    "log.generate_tokens": "generate",
    "step": "checkpoints",
    "matrix": "matrix",
    "network": "at-large",
    "checkpoint.bandwidth": "at-large",
    "prompt": "generate",
    "generate.tokens": "generate",
    "generate.temperature": "generate",
    "compile": "go-faster",
    "num_workers": "go-faster",
    "profile": "go-faster",
    "activation_checkpointing": "fit-memory",
    "init": "export",
    "nonfinite.limit": "look-inside",
    "data.show": "look-inside",
    "data.augment": "images",
    "log.generate": "generate",
    "log.noise_scale": "batch-size",
    "ema.decay": "checkpoints",
    "clip_norm": "learning-rate",
    "objective.metrics": "metrics",
    "optimizer.groups": "learning-rate",
    "parts": "own/state",
    "transforms": "own/transform",
    "trust": "share-a-recipe",
}

INTRODUCTION = """Every setting (argument, hyperparameter) of a run is a key with a default.
`train KEY=VALUE` sets a key. `train GROUP=OPTION` picks a file of `conf/GROUP/`. `train --help`
prints the same. These pages are made by `python docs/generate.py` from `trainer/config/` and
`conf/`.
"""
GALLERY = """A recipe is a YAML file of settings with a measured result. `train recipe=NAME` runs
it, and settings behind it change it. `train recipes` prints this list.
[Share a recipe](how-to/share-a-recipe.md) says how to write one.

The figures were measured on two cores of a CPU unless the cost names a GPU. This page is made by
`python docs/generate.py`.
"""
HEAD = ("key", "default", "what it is")
_IN_CODE = re.compile(
    r"`[^`]*`|(?:[\w.]+=)?(?:\[(?:[^][]|\[[^][]*\])*\]|\{(?:[^{}]|\{[^{}]*\})*\})"
)
_SETTING = re.compile(r"`[^`]*`|(?<!\w)[a-z][\w.]*=[^\s,;)]*[^\s,;).]")
_REFERENCE = re.compile(r"`\$\{oc\.\w+:([\w.]+),(\w+)\}`")


@final
@dataclass
class Option:
    """A file of conf/: what it says of itself, and a row of each of its keys."""

    name: str
    about: str
    rows: dict[str, tuple[str, str]] = field(default_factory=dict)


def main() -> None:
    """Write all pages."""
    try:
        made = pages()
    except ValueError as error:
        sys.exit(str(error))
    for path, text in made.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def pages() -> dict[Path, str]:
    """Give the text of every page that is made."""
    for group in GROUPS:
        if group.partition(".")[0] not in PAGES:
            raise ValueError(f"conf/{group}: has no page; add it to PAGES in docs/generate.py")
    found = {name: [] for name in PAGES}
    for name in keys_of_every_run():
        first = name.partition(".")[0]
        page = MOVED.get(name, first)
        found[page if page in PAGES else REST].append(name)
    folder = DOCS / "configuration"
    made = {folder / f"{name}.md": page_of(name, keys) for name, keys in found.items()}
    return {folder / "index.md": index_of(), **made, DOCS / "recipes.md": gallery()}


def keys_of_every_run() -> Iterator[str]:
    """Give the keys that are no arguments of one option alone."""
    common = flat(load_yaml(data_dir("conf") / "config.yaml"))
    in_options = set[str]()
    for group in GROUPS:
        for file in files_of(group):
            in_options |= {f"{group}.{key}" for key in flat(load_yaml(file))}
    for name, key in KEYS.items():
        if key.annotation is not None and (name in common or name not in in_options):
            yield name


def files_of(group: str) -> list[Path]:
    """List the files of the options of a group."""
    folder = trackers.OPTIONS_FOLDER if group == trackers.TRACKER_GROUP else group
    files = sorted((data_dir("conf") / folder.replace(".", "/")).glob("*.yaml"))
    return [file for file in files if file.stem != OWN]


def index_of() -> str:
    """Give the page that leads to the others."""
    lines = ["# Keys", "", INTRODUCTION]
    rows = [("page", "what its keys decide", "how to")]
    for name, (about, how_to) in PAGES.items():
        rows.append((f"[{titled(name)}]({name}.md)", about, links(how_to)))
    lines += table(rows)
    return "\n".join(lines)


def titled(name: str) -> str:
    """Give the heading of a page: a group as it is given, else a word."""
    words = {"run": "The run", "hardware": "Hardware and precision", "own": "Code of your own"}
    return words.get(name, f"`{name}`")


def page_of(name: str, keys: list[str]) -> str:
    """Give the page of a group: keys of every run first, then those of each option."""
    about, how_to = PAGES[name]
    first = f"{about[0].upper()}{about[1:]}. How to: {links(how_to)}."
    lines = [f"# {titled(name)}", "", first, ""]
    if keys:
        lines += table([HEAD, *(row(key, show(KEYS[key].default), KEYS[key].doc) for key in keys)])
    for group in (*GROUPS, trackers.TRACKER_GROUP):
        if group.partition(".")[0] == name:
            lines += sections(group)
    return "\n".join(lines)


def sections(group: str) -> list[str]:
    """Lay out the options of a group, what all of them take first."""
    options = [option_of(group, file) for file in files_of(group)]
    shared = dict(options[0].rows) if len(options) > 1 else {}
    for option in options:
        shared = dict(shared.items() & option.rows.items())
    lines = []
    if shared:
        ordered = [(key, *rest) for key, rest in options[0].rows.items() if key in shared]
        lines += [f"## Every `{group}=`", "", *table([HEAD, *(row(*each) for each in ordered)])]
    for option in options:
        own = [(key, *rest) for key, rest in option.rows.items() if key not in shared]
        lines += [f"## `{option.name}`", "", prose(option.about), ""]
        lines += table([HEAD, *(row(*each) for each in own)]) if own else []
    return lines


def option_of(group: str, file: Path) -> Option:
    """Read an option: the comment at its head, and its keys."""
    tracks = group == trackers.TRACKER_GROUP
    head = takewhile(lambda line: line.startswith("#"), file.read_text().splitlines())
    about = " ".join(line.lstrip("# ") for line in head)
    name = f"[{file.stem}]" if tracks else file.stem
    option = Option(f"{group.replace('.', '/')}={name}", about)
    docs, root = docs_of(file), file.stem if tracks else group
    for key, value in flat(load_yaml(file)).items():
        if key != "_target_":
            option.rows[f"{root}.{key}"] = (show(value), docs.get(key, ""))
    return option


def row(key: str, default: str, doc: str) -> tuple[str, ...]:
    """Give the row of a key: the words that it takes stand before what it is."""
    choices = KEYS[key].choices if key in KEYS else ()
    words = ", ".join(f"`{word}`" for word in choices)
    default = _REFERENCE.sub(r"`\1`, else `\2`", f"`{default}`")
    how = f"({links(HOW_TO[key])})" if key in HOW_TO else ""
    parts = (f"{words}:" if len(choices) > 1 else "", prose(doc), how)
    return (f"`{key}`", default, " ".join(filter(None, parts)))


def prose(doc: str) -> str:
    """Write a comment of conf/ as Markdown: lists and mappings are code, and `<` is no tag."""
    parts, end = [], 0
    for code in _IN_CODE.finditer(doc):
        parts += [doc[end : code.start()].replace("<", "&lt;"), f"`{code[0].strip('`')}`"]
        end = code.end()
    return "".join([*parts, doc[end:].replace("<", "&lt;")])


def links(names: str) -> str:
    """Link how-to pages by their headings."""
    made = []
    for name in names.split():
        heading = (DOCS / "how-to" / f"{name}.md").read_text().splitlines()[0].lstrip("# ")
        made.append(f"[{heading[0].lower()}{heading[1:]}](../how-to/{name}.md)")
    return ", ".join(made)


def table(rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Lay out rows as a table of Markdown, the first one its head."""
    escaped = [[cell.replace("|", r"\|") for cell in cells] for cells in rows]
    lines = [f"| {' | '.join(cells)} |" for cells in escaped]
    return [lines[0], f"|{'---|' * len(escaped[0])}", *lines[1:], ""]


def gallery() -> str:
    """Give the page of the recipes: a table, and what the head of each file says."""
    lines = ["# Recipes", "", GALLERY]
    rows, parts = [("recipe", "what it does", "cost", "result")], list[str]()
    for file in sorted(data_dir("recipes").glob("*.yaml")):
        meta: dict[str, Any] = load_yaml(file)["meta"]
        link = f"[`{file.stem}`](#{file.stem})"
        rows.append((link, meta["purpose"], meta["cost"], meta["expected"]))
        parts += [f"## {file.stem}", "", *head_of(file.read_text()), ""]
    return "\n".join([*lines, *table(rows), *parts])


def head_of(text: str) -> list[str]:
    """Write the comment at the head of a recipe as Markdown; what is set in stands as code."""
    head = takewhile(lambda line: line.startswith("#"), text.splitlines())
    lines, code = [], False
    for line in head:
        words = line[1:].removeprefix(" ")
        is_code = words.startswith("  ")
        if is_code != code:
            lines.append("```{.sh .shell}" if is_code else "```")
            code = is_code
        lines.append(words[2:] if is_code else _SETTING.sub(as_code, words))
    return lines


def as_code(found: re.Match[str]) -> str:
    """Write what was found as code, once."""
    return f"`{found[0].strip('`')}`"


if __name__ == "__main__":
    main()
