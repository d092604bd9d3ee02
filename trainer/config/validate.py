"""Turn a composed config into a valid `RunConfig`, or name everything that is wrong with it.

The composition of the chosen options alone, without a single value of the user's, is the example
that a config is compared with. So a class of anyone's own is checked like a built-in one, and a
misspelt key is found though Hydra's `+` let it in.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any

import yaml
from pydantic import ValidationError

from trainer.config import components, data_sets, messages, trackers
from trainer.config.declared import declared
from trainer.config.keys import KEYS
from trainer.config.messages import Tree
from trainer.config.option_files import OWN, data_dir, default_options, options_of
from trainer.config.other_trainers import NONE_HERE, OTHER_WORDS, REFUSED, REFUSED_CLASSES
from trainer.config.rules import give_way, rule_faults
from trainer.config.run_config import FullConfig, RunConfig
from trainer.config.secrets import is_secret, leaked
from trainer.core.errors import ConfigError

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
    named = _options(choices or {}, typed_keys)
    tree = copy.deepcopy(dict(raw))
    odd = [p for p in components.COMPONENTS if not isinstance(messages.lookup(tree, p), Mapping)]
    if odd:
        raise ConfigError(
            *(
                messages.line(p, messages.lookup(tree, p), "takes an option or a mapping")
                for p in odd
            )
        )
    # One search of all values at once: of each, it would take most of the time of a start.
    environ = os.environ if leaked(tree, os.environ) else {}
    known, built_in = trackers.options(config_dir), trackers.options()
    typed_targets = {*typed_targets, *(n for n in known if known[n] != built_in.get(n))}
    faults = [*trackers.complete(tree, config_dir, typed_keys)]
    faults += [*_leaf_faults("", tree, named, environ), *_argument_faults(tree, base, named)]
    give_way(tree, typed_keys, KEYS["batch.global"].default)
    tree |= _replaced_length(tree, typed_keys)
    faults += rule_faults(tree, named)
    for name in known.keys() & trackers.names_in(tree):
        faults += _section_faults(name, tree[name], known[name], base, named)
    kind = str(messages.lookup(tree, "optimizer._target_"))
    if why := REFUSED_CLASSES.get(kind.lower()):
        faults.append(messages.line("optimizer._target_", kind, why))

    def is_default(key: str) -> bool:  # nobody set it, or the other way to state it
        same = {"steps", "epochs"} if key in {"steps", "epochs"} else {key}
        is_open = key != "batch.global" or not named.get("recipe")  # which may state the default
        is_same = all(messages.lookup(tree, k) == messages.lookup(base, k) for k in same)
        return is_open and is_same and same.isdisjoint(typed_keys)

    beside = {"config_dir": config_dir, "unset": [*filter(is_default, _SHOWN_DEFAULTS)]}
    try:
        config = FullConfig.model_validate(_fields(tree, named, typed_targets) | beside)
    except ValidationError as error:
        faults += _schema_faults(error, tree, base, named)
    if faults:
        meant = {fault.partition("Did you mean ")[2] for fault in faults}
        faults = [each for each in faults if f"{each.partition(':')[0]}?" not in meant]
        # One line for each key and value: the first says most.
        raise ConfigError(*{fault.partition(": ")[0]: fault for fault in reversed(faults)}.values())
    return config


def _options(choices: Tree, typed: Collection[str]) -> dict[str, str]:
    """Name the option of each group; a class that was typed is no option's any more."""
    named = {g: n for g, n in choices.items() if not g.startswith("hydra/") and "@" not in g}
    return named | {
        p.replace(".", "/"): OWN for p in components.COMPONENTS if f"{p}._target_" in typed
    }


def _replaced_length(tree: Tree, typed: Collection[str]) -> dict[str, None]:
    """Let steps that are typed stand in place of the epochs of a recipe, or the reverse."""
    pairs = (("steps", "epochs"), ("epochs", "steps"))
    return {b: None for a, b in pairs if a in typed and b not in typed and tree[a] is not None}


def from_plain(plain: Tree) -> RunConfig:
    """Read what `to_plain` wrote; never consent and `trust`."""
    choices, whole = dict(plain.get("choices", {})), {**plain, "trust": []}
    try:
        return FullConfig.model_validate(_fields(whole, choices, ()))
    except ValidationError as error:
        raise ConfigError(*dict.fromkeys(_schema_faults(error, plain, {}, choices))) from None


def secret_fault(key: str, value: object, environ: Mapping[str, str] = os.environ) -> str | None:
    """Say why the value of a dotted key must not be written into a run folder, or None."""
    where = "settings are written into the run folder; leave it in the environment"
    if variable := leaked(value, environ):
        return messages.clip(f"{key}: holds the secret of ${variable}, and {where}")
    if is_secret(key.rpartition(".")[2], value):
        return messages.clip(f"{key}: looks like a secret, and {where}, where the library reads it")
    return None


def _choice(owner: str, choices: Tree) -> str:
    """Write which option a component was chosen by: `model=gpt_tiny`."""
    option = choices.get(owner.replace(".", "/"))
    return f"{owner}={option}" if option else owner


def _leaf_faults(
    key: str, value: object, choices: Tree, environ: Mapping[str, str]
) -> Iterator[str]:
    """Find values that are missing, and secrets, at any depth."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaf_faults(f"{key}.{name}".removeprefix("."), inner, choices, environ)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _leaf_faults(key, inner, choices, environ)
    elif isinstance(value, str) and "\0" in value:
        yield messages.clip(f"{key}: holds a NUL character; leave it out")
    elif value == messages.MISSING:
        yield _needed(key, choices)
    elif fault := secret_fault(key, value, environ):
        yield fault


def _needed(key: str, choices: Tree) -> str:
    """Say that a value is missing, with an example where its type has one."""
    owner, _, name = key.rpartition(".")
    option = (
        options_of(owner).get(str(choices.get(owner)), {}) if owner in components.COMPONENTS else {}
    )
    words = dict(components.alternatives(declared(str(option.get("_target_"))).types.get(name)))
    example = messages.either(words).partition("e.g. ")[2] if words else ""
    typed = f"e.g. {key}={example}" if example else f"{key}=..."
    return messages.clip(
        f"{key}: {_choice(components.owner_of(key) or key, choices)} needs it, {typed}"
    )


def _argument_faults(tree: Tree, base: Tree, choices: Tree) -> Iterator[str]:
    """Read every constructor argument as the type it has there or in its option, in place."""
    for path in components.COMPONENTS:
        yield from _section_faults(
            path, messages.lookup(tree, path), messages.lookup(base, path), base, choices
        )
    examples = (data_sets.set_defaults(messages.lookup(base, "data")), data_sets.source_option())
    for sections, example in zip(
        (data_sets.eval_sets(tree), data_sets.sources(tree)), examples, strict=True
    ):
        for place, section in sections.items():
            typed = messages.lookup(tree, place)
            target = section.get("_target_") if isinstance(section, Mapping) else ""
            if not isinstance(target, str):
                yield messages.line(
                    f"{place}._target_", target, "names a class: type package.Class"
                )
                continue
            yield from _section_faults(place, section, example, base, choices, typed)
            if isinstance(section, Mapping) and section.get("path") == messages.MISSING:
                yield messages.clip(f"{place}.path: needed; type {place}.path=FILE")


def _section_faults(
    place: str, section: Tree, example: Tree, base: Tree, choices: Tree, typed: object = None
) -> Iterator[str]:
    """Read the arguments of a class; they are those of `section`, or `typed` among them."""
    own = section if typed is None else typed
    if not isinstance(own, dict):
        return
    # A class that its option does not name takes arguments that only its constructor knows.
    is_own = section.get("_target_") != example.get("_target_")
    is_open = is_own or _is_open(section)
    types = _types(components.owner_of(place) or place, section, {} if is_own else example)
    types |= (
        {data_sets.SOURCE_WEIGHT: components.Positive} if data_sets.SOURCE_WEIGHT in example else {}
    )
    for name, value in own.items():
        key, default = f"{place}.{name}", example.get(name)
        if name in components.extra_keys(place) or value == messages.MISSING:
            continue
        is_refused = name in REFUSED and not (is_own and place == "data")
        is_known = not is_refused and (name in example or is_open)
        if not is_known and place not in components.COMPONENTS:
            names = [each for each in example if each != "_target_"]
            near = messages.did_you_mean(key, [f"{place}.{each}" for each in names])
            yield messages.clip(f"{key}: unknown setting.{near or ' It has ' + ', '.join(names)}")
        elif not is_known:
            yield _unknown(key, value, base, choices)
        elif name in types and not (type(value) is type(default) and value == default):
            try:
                read = components.convert(types[name], value)
                own[name] = [*read] if isinstance(read, tuple) else read  # as a file has it
            except ValidationError as error:
                entry = error.errors()[0]["loc"]
                yield messages.value_fault(key, types[name], value, default, entry)


def _types(owner: str, section: Tree, example: Tree) -> dict[str, Any]:
    """Give the types of a component's arguments, by its option where it is of its class."""
    types = {name: components.type_like(value) for name, value in example.items()}
    target = str(section.get("_target_"))
    shared = data_sets.source_option()["_target_"] if data_sets.sources_argument(target) else None
    own = {**(declared(shared).types if shared else {}), **declared(target).types}
    types |= {n: t | None if n in components.FROM_DATA else t for n, t in own.items()}
    is_shared = bool(example) or owner in {"optimizer", "scheduler"}
    return types | {
        n: t for n, t in components.SHARED.get(owner, {}).items() if is_shared or n in own
    }


def hint_for(key: str, offers: Collection[str]) -> str:
    """Offer what is meant by a key that is none: as other trainers have it, or spelt like it."""
    name = key.rpartition(".")[2]
    if name in NONE_HERE:
        return f" Here {NONE_HERE[name]}"
    meant = OTHER_WORDS.get(name)
    return f" Did you mean {meant}?" if meant else messages.did_you_mean(key, offers)


def suits(key: str, text: str) -> bool:
    """Whether a typed value may be one of a setting, by its type or that in an option's file."""
    owner, _, name = key.rpartition(".")
    if key in {*components.COMPONENTS, "parallel"} or key == trackers.TRACKER_GROUP:
        return text in (trackers.options() if key == trackers.TRACKER_GROUP else options_of(key))
    examples = [keys[name] for keys in options_of(owner).values() if name in keys] if owner else []
    kinds = [KEYS[key].annotation] if key in KEYS else [*map(components.type_like, examples)]
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return False
    with suppress(ValueError):
        value = float(value) if isinstance(value, str) else value  # 1e-3
    try:
        return bool([components.convert(str if kind is Any else kind, value) for kind in kinds])
    except ValidationError:
        return False


def _is_open(option: Tree) -> bool:
    """Whether the class of an option takes names beyond those of its file."""
    return declared(str(option.get("_target_"))).takes_more


def _unknown(key: str, value: object, known: Tree, choices: Tree) -> str:
    """Say what is meant by a key that is none."""
    owner, name = components.owner_of(key), key.rpartition(".")[2]
    if name in REFUSED:
        return messages.line(key, value, REFUSED[name])
    options = options_of(owner) if owner else {}
    others = [o for o, keys in options.items() if name in keys or _is_open(keys)]
    # `auto` leaves more open than the rest, and the default is known best.
    usual = default_options(data_dir("conf")).get(owner or "")
    others.sort(key=lambda option: (option == "auto", option != usual))
    if owner and others and key != owner:
        better = f"{owner}={others[0]} {key}={messages.show(value)}"
        return messages.line(
            key, value, f"not a setting of {_choice(owner, choices)}; type {better}"
        )
    every = (*messages.flat(known), *KEYS, *messages.flat(trackers.options()))
    offers = [each for each in every if not each.endswith("_target_")]
    hint = hint_for(key, offers)
    if not hint and owner:
        names = [k for k in messages.lookup(known, owner) if f"{owner}.{k}" in offers]
        hint = f" {_choice(owner, choices)} has {', '.join(names) or 'none'}"
    return messages.clip(f"{key}: unknown setting.{hint}")


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
        options = {key.replace(".", "/"): choices.get("data") for key in data_sets.eval_sets(tree)}
        sets = {
            key.removeprefix(f"{components.EVAL_SETS}."): _component(section, key, options, typed)
            for key, section in data_sets.eval_sets(tree).items()
        }
        fields["eval"] = {**evaluation, "sets": sets or evaluation["sets"]}
    return fields


def _entry(entry: object, path: str, tree: Tree, typed: Collection[str]) -> object:
    """Read an entry of a list of classes; the settings of a tracker stand beside the list."""
    if path == trackers.TRACKER_GROUP and trackers.is_name(entry):
        return _component(tree.get(str(entry)), str(entry), {str(entry): entry}, typed)
    return _component({"_target_": entry} if isinstance(entry, str) else entry, path, {}, typed)


def _component(section: object, path: str, choices: Tree, typed: Collection[str]) -> object:
    """Tell the arguments of a class from the class and from the program's own keys."""
    if not isinstance(section, Mapping):
        return section
    extras = {key: section[key] for key in components.extra_keys(path) if key in section}
    params = {k: v for k, v in section.items() if k not in extras and k != "_target_"}
    if "gradient" in extras:
        extras["gradient"] = _component(extras["gradient"], f"{path}.gradient", choices, typed)
    option = choices.get(path.replace(".", "/"))
    name = None if option == OWN else option
    identity = {"target": section.get("_target_"), "name": name, "typed_target": path in typed}
    return {**extras, **identity, "params": params}


def _schema_faults(error: ValidationError, tree: Tree, base: Tree, choices: Tree) -> Iterator[str]:
    """Put the errors of pydantic into the words of the interface."""
    for item in error.errors(include_url=False):
        path = ".".join(part for part in item["loc"] if isinstance(part, str))
        key = next((k for k in (path, *messages.ancestors(path)) if k in KEYS), path)
        value = messages.lookup(tree, key)
        if item["loc"][-1] == "target":
            parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in item["loc"])
            key = "".join(parts).removeprefix(".").removesuffix(".target")
            yield messages.line(f"{key}._target_", item["input"], messages.NO_CLASS)
        elif item["type"] == "missing":
            yield f"{path}: is missing"
        elif item["type"] == "extra_forbidden" and "." in str(item["loc"][-1]):
            nested = f"{path.replace('.', ': {')}: ...{'}' * path.count('.')}"
            yield messages.clip(f"{path}: in a file, nest the keys: {nested}")
        elif item["type"] == "extra_forbidden":
            for unknown, given in messages.flat({path: item["input"]}).items():
                yield _unknown(unknown, given, base, choices)
        elif key not in KEYS:
            names = [k.removeprefix(f"{key}.") for k in KEYS if k.startswith(f"{key}.")]
            yield messages.line(key, value, f"is a section, not a value; it has {', '.join(names)}")
        else:
            yield messages.value_fault(key, KEYS[key].annotation, value, messages.lookup(base, key))
