"""List the keys of the interface: type from the schema, default and doc from the files of `conf/`.

The line `lr: 3.0e-4 # learning rate` of an option file is the only place that says either.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final, get_type_hints

from trainer.config.components import FEATURES, GROUPS, SHARED, Section
from trainer.config.declared import alternatives, declared
from trainer.config.messages import flat
from trainer.config.option_files import data_dir, default_options, load_yaml, options_of
from trainer.config.run_config import FullConfig

_LINE = re.compile(r"( *)([\w.]+):.*?(?: # (.*))?")


@final
@dataclass(frozen=True, slots=True)
class Key:
    """One key of the interface, for the help and for messages."""

    annotation: Any  # type of its value; None where it is the name of an option
    doc: str  # one line
    default: Any  # of the default options

    @property
    def choices(self) -> tuple[str, ...]:
        """The words it takes; empty where any value of its kind will do."""
        return tuple(word for word, is_typed in alternatives(self.annotation) if is_typed)


def docs_of(file: Path, prefix: str = "") -> dict[str, str]:
    """Read the comment behind every key of a file."""
    docs: dict[str, str] = {}
    sections: list[str] = []
    for line in file.read_text().splitlines():
        if match := _LINE.fullmatch(line):
            indent, name, doc = match.groups()
            sections[len(indent) // 2 :] = [name]
            docs[prefix + ".".join(sections)] = doc or ""
    return docs


def _annotations(model: type[Section], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Give every key below a section with its type, in reading order."""
    hints = get_type_hints(model, include_extras=True)
    for name, info in model.model_fields.items():
        key, annotation = prefix + (info.alias or name), hints[name]
        # That is the `_target_` of a component.
        if not info.is_required() or name == "target":
            continue
        if not (isinstance(annotation, type) and issubclass(annotation, Section)):
            yield key, annotation
            continue
        if key in GROUPS:
            yield key, None
        yield from _annotations(annotation, f"{key}.")
        yield from ((f"{key}.{argument}", kind) for argument, kind in SHARED.get(key, {}).items())


def _keys() -> dict[str, Key]:
    """Join types with the docs and defaults of `conf/`, those of default options first."""
    conf = data_dir("conf")
    primary, chosen = load_yaml(conf / "config.yaml"), default_options(conf)
    docs, defaults = docs_of(conf / "config.yaml"), flat(primary)
    types = dict(_annotations(FullConfig))
    # Options of a feature all take the arguments that the primary config has.
    for feature in FEATURES:
        known = declared(options_of(feature)[chosen[feature]]["_target_"]).types
        types |= {f"{feature}.{name}": known[name] for name in primary.get(feature, ())}
    for group, option in chosen.items():
        # Options say the same of an argument that they share, and the default option goes first.
        if group in GROUPS:
            folder = conf / group.replace(".", "/")
            first = folder / f"{option}.yaml"
            defaults |= flat(load_yaml(first), f"{group}.")
            for file in (first, *sorted(folder.glob("*.yaml"))):
                docs = docs_of(file, f"{group}.") | docs
    return {
        key: Key(kind, "" if kind is None else docs[key], defaults.get(key))
        for key, kind in types.items()
    }


KEYS: Mapping[str, Key] = _keys()  # every key of the interface in reading order
