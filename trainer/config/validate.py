"""Turn a composed config into a valid `RunConfig`, or name everything that is wrong with it.

The composition of the chosen options alone, without a single value of the user's, is the example
that a config is compared with. So a class of anyone's own is checked like a built-in one, and a
misspelt key is found though Hydra's `+` let it in.
"""

from __future__ import annotations

import copy
import os
import re
import shlex
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

from pydantic import ValidationError

from trainer.config import components, data_sets, messages, trackers
from trainer.config.declared import alternatives, declared
from trainer.config.keys import KEYS
from trainer.config.messages import MISSING, Tree, lookup
from trainer.config.option_files import OWN, data_dir, default_options, options_of
from trainer.config.other_trainers import REFUSED, REFUSED_CLASSES, hint_for
from trainer.config.rules import give_way, rule_faults
from trainer.config.run_config import FINE_TUNING, FullConfig, RunConfig, to_plain
from trainer.config.secrets import is_secret, leaked
from trainer.core.errors import ConfigError
from trainer.core.rows import Row, join_parts, row

# Keys whose values the start of a run shows as defaults where nobody set them.
_SHOWN_DEFAULTS = ["optimizer.lr", "scheduler.warmup", "steps", "epochs"]
_SHOWN_DEFAULTS += ["eval.every", "checkpoint.every", "batch.global"]


def validate(
    raw: Tree,
    base: Tree,
    typed_targets: Collection[str] = (),
    choices: Tree | None = None,
    typed_keys: Collection[str] = (),
    config_dir: str | None = None,
) -> RunConfig:
    """Turn a composed config, plain and resolved, into a valid one; a `ConfigError` has all faults.

    `base` is composed of the same groups and options without any value, of the command line or of
    a recipe: the example for names and types. `typed_targets` are components whose class the user
    named, `typed_keys` what the command line gives a value. `choices` has the option of every
    group by the folder's name, `accum/gradient` too.
    """
    tree, named = copy.deepcopy(dict(raw)), _options(choices or {}, typed_keys)
    faults = list[str]()
    for path in components.COMPONENTS:
        if not isinstance(section := lookup(tree, path), Mapping):
            faults.append(messages.line(path, section, "takes an option or a mapping"))
    if faults:
        raise ConfigError(*faults)
    known = trackers.options(config_dir)
    built_in = trackers.options() if config_dir else known
    typed_targets = {*typed_targets}
    for name, option in known.items():
        # Of the user's own folder, which is consent as typing is
        if option != built_in.get(name):
            typed_targets.add(name)
    composed = Composed(tree, base, named)

    faults += trackers.complete(tree, known, typed_keys)
    # One search of all values at once: of each, it would take most of the time of a start.
    environ = os.environ if leaked(tree, os.environ) else {}
    faults += [*composed.leaf_faults("", tree, environ), *composed.argument_faults()]
    # What is typed replaces what stands for the same; rules are about what is left.
    give_way(tree, typed_keys, KEYS["batch.global"].default)
    faults += rule_faults(tree, named)
    for name in known.keys() & trackers.names_in(tree):
        faults += composed.section_faults(name, tree[name], known[name])
    kind = str(lookup(tree, "optimizer._target_"))
    if why := REFUSED_CLASSES.get(kind.lower()):
        faults.append(messages.line("optimizer._target_", kind, why))

    unset = [key for key in _SHOWN_DEFAULTS if _is_default(key, composed, typed_keys)]
    fields = _fields(tree, named, typed_targets)
    try:
        config = FullConfig.model_validate({**fields, "config_dir": config_dir, "unset": unset})
    except ValidationError as error:
        faults += composed.schema_faults(error)
    if faults:
        raise ConfigError(*_distinct(faults))
    return config


def _options(choices: Tree, typed: Collection[str]) -> dict[str, str]:
    """Name the option of each group; a class that was typed is no option's any more."""
    named = dict[str, str]()
    for group, option in choices.items():
        if not group.startswith("hydra/") and "@" not in group:
            named[group] = option
    for path in components.COMPONENTS:
        if f"{path}._target_" in typed:
            named[path.replace(".", "/")] = OWN
    return named


def _is_default(key: str, composed: Composed, typed: Collection[str]) -> bool:
    """Whether nobody set a key, or the other way to state the same; a recipe may have."""
    same = {key}
    if key in {"steps", "epochs"}:
        same = {"steps", "epochs"}
    is_open = key != "batch.global" or not composed.choices.get("recipe")
    is_same = all(lookup(composed.tree, k) == lookup(composed.base, k) for k in same)
    return is_open and is_same and same.isdisjoint(typed)


def _distinct(faults: Collection[str]) -> list[str]:
    """Leave one line for each key and value, the first, which says most."""
    meant = {fault.partition("Did you mean ")[2] for fault in faults}
    found = dict[str, str]()
    for fault in reversed([*faults]):
        # That a key is missing says nothing once another is taken for it.
        if f"{fault.partition(':')[0]}?" not in meant:
            found[fault.partition(": ")[0]] = fault
    return [*found.values()]


def from_plain(plain: Tree) -> RunConfig:
    """Read what `to_plain` wrote; never consent and `trust`."""
    choices = dict(plain.get("choices", {}))
    try:
        return FullConfig.model_validate(_fields({**plain, "trust": []}, choices, ()))
    except ValidationError as error:
        composed = Composed(dict(plain), {}, choices)
        raise ConfigError(*dict.fromkeys(composed.schema_faults(error))) from None


def _fields(tree: Tree, choices: Tree, typed: Collection[str]) -> dict[str, Any]:
    """Bring a composed tree into the shape of `RunConfig`."""
    fields: dict[str, Any] = {**tree, "choices": dict(choices)}
    for path in components.COMPONENTS:
        if "." not in path:
            fields[path] = _component(tree.get(path), path, choices, typed)
    for name in components.LISTS:
        if isinstance(entries := tree.get(name), list | tuple):
            fields[name] = [_entry(each, name, tree, typed) for each in entries]
    for name in trackers.names_in(tree):
        fields.pop(name, None)
    if isinstance(evaluation := tree.get("eval"), Mapping) and "sets" in evaluation:
        sets = dict[str, object]()
        for key, section in data_sets.eval_sets(tree).items():
            option = {key.replace(".", "/"): choices.get("data")}
            name = key.removeprefix(f"{components.EVAL_SETS}.")
            sets[name] = _component(section, key, option, typed)
        fields["eval"] = {**evaluation, "sets": sets or evaluation["sets"]}
    return fields


def _entry(entry: object, path: str, tree: Tree, typed: Collection[str]) -> object:
    """Read an entry of a list of classes; the settings of a tracker stand beside the list."""
    if path == trackers.TRACKER_GROUP and trackers.is_name(entry):
        return _component(tree.get(str(entry)), str(entry), {str(entry): entry}, typed)
    # A name alone is a class without arguments.
    if isinstance(entry, str):
        entry = {"_target_": entry}
    return _component(entry, path, {}, typed)


def _component(section: object, path: str, choices: Tree, typed: Collection[str]) -> object:
    """Tell the arguments of a class from the class and from the program's own keys."""
    if not isinstance(section, Mapping):
        return section
    own_keys = components.extra_keys(path)
    extras, params = dict[str, object](), dict[str, object]()
    for key, value in section.items():
        if key in own_keys:
            extras[key] = value
        elif key != "_target_":
            params[key] = value
    if "gradient" in extras:
        extras["gradient"] = _component(extras["gradient"], f"{path}.gradient", choices, typed)
    name = choices.get(path.replace(".", "/"))
    if name == OWN:
        name = None
    identity = {"target": section.get("_target_"), "name": name, "typed_target": path in typed}
    return {**extras, **identity, "params": params}


@final
@dataclass(frozen=True)
class Composed:
    """A config as it was composed, plain, and the example that its names and values are like."""

    tree: dict[str, Any]  # what its types read is put back in place
    base: Tree  # the same options without a value of the command line or of a recipe
    choices: Tree  # the option of each group, by the folder's name: `accum/gradient`

    def leaf_faults(self, key: str, value: object, environ: Mapping[str, str]) -> Iterator[str]:
        """Find values that are missing, and secrets, at any depth."""
        if isinstance(value, Mapping):
            for name, inner in value.items():
                yield from self.leaf_faults(f"{key}.{name}".removeprefix("."), inner, environ)
        elif isinstance(value, list | tuple):
            for inner in value:
                yield from self.leaf_faults(key, inner, environ)
        elif isinstance(value, str) and "\0" in value:
            yield messages.clip(f"{key}: holds a NUL character; leave it out")
        elif value == MISSING:
            yield self._needed(key)
        elif fault := secret_fault(key, value, environ):
            yield fault

    def _needed(self, key: str) -> str:
        """Say that a value is missing, with an example where its type has one."""
        owner, _, name = key.rpartition(".")
        option: Mapping[str, Any] = {}
        if owner in components.COMPONENTS:
            option = options_of(owner).get(str(self.choices.get(owner)), {})
        kind = declared(str(option.get("_target_"))).types.get(name)
        # The words of a type end with an example where it has one: `e.g. {0: 64, 20k: 256}`.
        example = ", ".join(dict(alternatives(kind))).partition("e.g. ")[2]
        chosen = self._option(components.owner_of(key) or key)
        typed = f"e.g. {key}={example}" if example else f"{key}=..."
        return messages.clip(f"{key}: {chosen} needs it, {typed}")

    def _option(self, owner: str) -> str:
        """Write which option a component was chosen by: `model=gpt_tiny`."""
        option = self.choices.get(owner.replace(".", "/"))
        return f"{owner}={option}" if option else owner

    def argument_faults(self) -> Iterator[str]:
        """Read every argument of a class as the type it has there or in its option."""
        for path in components.COMPONENTS:
            yield from self.section_faults(path, lookup(self.tree, path), lookup(self.base, path))
        own_sets, of_sets = data_sets.eval_sets(self.tree), lookup(self.base, "data")
        sources, of_sources = data_sets.sources(self.tree), data_sets.source_option()
        for place, section in (own_sets | sources).items():
            # What is no mapping is refused by the schema.
            if not isinstance(section, Mapping):
                continue
            example = of_sources
            if place not in sources:
                example = data_sets.set_defaults(of_sets)
            yield from self.section_faults(place, section, example)
            if section.get("path") == MISSING:
                yield messages.clip(f"{place}.path: needed; type {place}.path=FILE")

    def section_faults(self, place: str, section: Tree, example: Tree) -> Iterator[str]:
        """Read what is typed of a class at a place; `section` has what it takes over, too."""
        own = lookup(self.tree, place)
        if not isinstance(own, dict):
            return
        # A class that its option does not name takes arguments that only its constructor knows.
        is_own = section.get("_target_") != example.get("_target_")
        is_open = is_own or _takes_more(section)
        types = _types(components.owner_of(place) or place, section, {} if is_own else example)
        for name, value in own.items():
            key, default = f"{place}.{name}", example.get(name)
            if name in components.extra_keys(place) or value == MISSING:
                continue
            is_refused = name in REFUSED and not (is_own and place == "data")
            if is_refused or not (is_open or name in example):
                yield self._unknown_in(place, name, value, example)
            elif name in types and not (type(value) is type(default) and value == default):
                try:
                    read = components.convert(types[name], value)
                except ValidationError as error:
                    entry = error.errors()[0]["loc"]
                    yield messages.value_fault(key, types[name], value, default, entry)
                else:
                    # A file has lists alone.
                    if isinstance(read, tuple):
                        read = [*read]
                    own[name] = read

    def _unknown_in(self, place: str, name: str, value: object, example: Tree) -> str:
        """Say what is meant by an argument that is none; of a data set, only its own may be."""
        key = f"{place}.{name}"
        if place in components.COMPONENTS:
            return self.unknown(key, value)
        names = [*example]
        if "_target_" in names:
            names.remove("_target_")
        near = messages.did_you_mean(key, [f"{place}.{each}" for each in names])
        return messages.one_line(f"{key}: unknown setting.{near or ' It has ' + ', '.join(names)}")

    def unknown(self, key: str, value: object) -> str:
        """Say what is meant by a key that is none."""
        owner, name = components.owner_of(key), key.rpartition(".")[2]
        if name in REFUSED:
            return messages.line(key, value, REFUSED[name])
        options, others = options_of(owner) if owner else {}, list[str]()
        for option, keys in options.items():
            if name in keys or _takes_more(keys):
                others.append(option)
        # `auto` leaves more open than the rest; of those the default is known best.
        usual = default_options(data_dir("conf")).get(owner or "")
        others.sort(key=lambda option: (option == "auto", option != usual))
        if owner and others and key != owner:
            better = f"{owner}={others[0]} {shlex.quote(f'{key}={messages.show(value)}')}"
            text = f"not a setting of {self._option(owner)}; type {better}"
            return messages.line(key, value, text)
        every = (*messages.flat(self.base), *KEYS, *messages.flat(trackers.options()))
        offers = [each for each in every if not each.endswith("_target_")]
        hint = hint_for(key, offers)
        if not hint and not owner:
            hint = messages.section_hint(key, offers)
        if not hint and owner:
            names = list[str]()
            for each in lookup(self.base, owner):
                if f"{owner}.{each}" in offers:
                    names.append(each)
            hint = f" {self._option(owner)} has {', '.join(names) or 'none'}"
        return messages.one_line(f"{key}: unknown setting.{hint}")

    def schema_faults(self, error: ValidationError) -> Iterator[str]:
        """Put the errors of pydantic into the words of the interface."""
        for item in error.errors(include_url=False):
            path = ".".join(part for part in item["loc"] if isinstance(part, str))
            key = next((k for k in (path, *messages.ancestors(path)) if k in KEYS), path)
            value = lookup(self.tree, key)
            # Keys beside `init` have a dot of their own.
            has_dot = "." in str(item["loc"][-1]) and not path.startswith("init.")
            if item["loc"][-1] == "target":
                place = re.sub(r"\.(\d+)", r"[\1]", ".".join(map(str, item["loc"][:-1])))
                yield messages.line(f"{place}._target_", item["input"], messages.NO_CLASS)
            elif item["type"] == "missing" or item["loc"][0] not in self.tree:
                yield f"{path}: is missing"
            elif item["type"] == "extra_forbidden" and has_dot:
                nested = f"{path.replace('.', ': {')}: ...{'}' * path.count('.')}"
                yield messages.clip(f"{path}: in a file, nest the keys: {nested}")
            elif item["type"] == "extra_forbidden":
                for unknown, given in messages.flat({path: item["input"]}).items():
                    yield self.unknown(unknown, given)
            elif key not in KEYS:
                names = [k.removeprefix(f"{key}.") for k in KEYS if k.startswith(f"{key}.")]
                text = f"is a section, not a value; it has {', '.join(names)}"
                yield messages.line(key, value, text)
            else:
                default = lookup(self.base, key)
                yield messages.value_fault(key, KEYS[key].annotation, value, default)


def secret_fault(key: str, value: object, environ: Mapping[str, str] = os.environ) -> str | None:
    """Say why the value of a dotted key must not be written into a run folder, or None."""
    where = "settings are written into the run folder; leave it in the environment"
    if variable := leaked(value, environ):
        return messages.clip(f"{key}: holds the secret of ${variable}, and {where}")
    if is_secret(key.rpartition(".")[2], value):
        return messages.clip(f"{key}: looks like a secret, and {where}, where the library reads it")
    return None


def _types(owner: str, section: Tree, example: Tree) -> dict[str, Any]:
    """Give the types of a component's arguments, by its option where it is of its class."""
    types = {name: components.type_like(value) for name, value in example.items()}
    target = str(section.get("_target_"))
    own = dict(declared(target).types)
    # Its other settings are of its sources.
    if data_sets.sources_argument(target):
        own = {**declared(data_sets.source_option()["_target_"]).types, **own}
    for name, kind in own.items():
        types[name] = kind | None if name in components.FROM_DATA else kind
    # Of a class of one's own too, but a cut or data may use such a word for something else.
    is_shared = bool(example) or owner in {"optimizer", "scheduler"}
    for name, kind in components.SHARED.get(owner, {}).items():
        if is_shared or name in own:
            types[name] = kind
    if data_sets.SOURCE_WEIGHT in example:
        types[data_sets.SOURCE_WEIGHT] = components.Positive
    return types


def _takes_more(option: Tree) -> bool:
    """Whether the class of an option takes names beyond those of its file."""
    return declared(str(option.get("_target_"))).takes_more


def defaults_row(config: RunConfig, by_job: Mapping[str, Any]) -> Row:
    """List keys of the step that nobody typed; `by_job` are those that the optimizer chose."""
    plain = messages.flat({**to_plain(config), "epochs": config.total_epochs})
    plain |= messages.flat({"optimizer": by_job})
    typed, why = list[str](), None
    for key in config.unset:
        value = plain.get(key)
        if key == "batch.global" and value == KEYS[key].default:
            continue  # `conf/` has it
        if key == "batch.global":
            _, largest, least = FINE_TUNING
            why = f"{key} at most {largest}, for {least} steps an epoch, as weights are loaded"
        # The length of a run is shown once.
        if value is not None or key not in ("steps", "epochs"):
            typed.append(f"{key}={messages.show(value)}")
    return row("defaults", join_parts(*typed, why), defaults=typed)
