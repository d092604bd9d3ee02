"""Configs: the schema, the option files, and what a mistake is answered with."""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf, open_dict

from trainer.config.components import COMPONENTS, GROUPS, OWN
from trainer.config.contract import config_hash, contract, contract_diff
from trainer.config.keys import KEYS, data_dir
from trainer.config.messages import LINE_LIMIT, did_you_mean, flat, lookup, prune
from trainer.config.recipes import register
from trainer.config.run_config import to_plain
from trainer.config.types import convert, parse_bytes, type_like
from trainer.config.validate import from_plain, validate
from trainer.core.errors import ConfigError

CONF = data_dir("conf")

SURFACE = [
    "accum",
    "accum.gradient",
    "accum.max_tokens",
    "accum.memory",
    "accum.micro",
    "accum.packed",
    "accum.steps",
    "activation_checkpointing",
    "batch",
    "batch.global",
    "batch.normalizer",
    "batch.tail",
    "batch.unit",
    "batchnorm",
    "checkpoint.asynchronous",
    "checkpoint.every",
    "checkpoint.keep",
    "checkpoint.on_full",
    "clip_norm",
    "command",
    "compile",
    "data",
    "data.holdout",
    "data.max_length",
    "data.on_bad",
    "data.overlong",
    "deterministic",
    "device",
    "epochs",
    "eval.every",
    "export.to",
    "hooks",
    "init",
    "log.every",
    "log.samples",
    "model",
    "name",
    "nonfinite.limit",
    "num_workers",
    "objective",
    "optimizer",
    "optimizer.lr",
    "optimizer.weight_decay",
    "outputs",
    "parallel",
    "parallel.max_restarts",
    "parallel.mode",
    "parallel.ranks",
    "parallel.replicate",
    "parallel.shard",
    "parallel.timeout_s",
    "precision",
    "resume",
    "resume_allow",
    "run",
    "scheduler",
    "scheduler.warmup",
    "seed",
    "step",
    "steps",
    "sync",
    "trust",
    "wandb.entity",
    "wandb.group",
    "wandb.mode",
    "wandb.project",
    "wandb.tags",
]

OPTIONS = {
    "accum": ["auto", "budget", "fixed", "own"],
    "accum/gradient": ["auto", "own", "sum"],
    "batch": ["samples", "tokens"],
    "data": ["own", "stdlib", "text", "tokens"],
    "model": ["gpt2", "gpt_small", "gpt_tiny", "own"],
    "objective": ["classify", "model_loss", "next_token", "own"],
    "optimizer": ["adamw", "own", "sgd"],
    "parallel": ["auto", "ddp", "fsdp", "hsdp", "none"],
    "preset": ["gpt_tiny_stdlib", "gpt_tiny_stdlib_adamw"],
    "scheduler": ["constant", "cosine", "own", "wsd"],
    "sync": ["auto", "deferred", "hierarchical", "immediate", "own"],
}

NEEDS: dict[str, dict[str, Any]] = {
    "accum=budget": {"accum.max_tokens": 4096},
    "accum=fixed": {"accum.micro": 8},
    "data=text": {"data.path": "notes.txt"},
    "data=tokens": {"data.path": "tokens.bin", "data.vocab_size": 256},
}
"""Values without which an option means nothing."""

# What the program passes to a constructor itself, or adds to a cut while it runs.
GIVEN = {
    "Auto": {"max_tokens", "alone", "cost", "lowered"},
    "Budget": {"lowered"},
    "StdlibText": {"split", "seed", "root"},
    "Text": {"split", "seed", "on_bad"},
    "TokenWindows": {"split"},
}

ALL_OPTIONS = [
    f"{group}={option}"
    for group, options in OPTIONS.items()
    for option in options
    if group != "preset"  # chosen by model and data, not typed
]


@pytest.fixture(autouse=True)
def quiet_environment(monkeypatch):
    for name in ("WANDB_MODE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@cache
def composed(*choices: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options alone, as plain mappings, and which they are."""
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        full = compose("config", overrides=list(choices), return_hydra_config=True)
    picked = dict(full.hydra.runtime.choices)
    with open_dict(full):
        del full["hydra"]
    return OmegaConf.to_container(full, resolve=True), picked


def put(tree: dict[str, Any], key: str, value: object) -> None:
    *sections, leaf = key.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
    tree[leaf] = value


def checked(values: dict[str, Any] | None = None, *choices: str):
    """Validate the options with these values typed."""
    values = values or {}
    base, picked = composed(*choices)
    raw = copy.deepcopy(base)
    for key, value in values.items():
        put(raw, key, value)
    named = {path for path in COMPONENTS if f"{path}._target_" in values}
    return validate(raw, base, named, picked, values.keys())


def faults_of(values: dict[str, Any], *choices: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        checked(values, *choices)
    return list(caught.value.faults)


def test_the_key_surface_is_this():
    assert sorted(KEYS) == SURFACE


def test_the_options_are_these():
    found = {
        str(folder.relative_to(CONF)): sorted(file.stem for file in folder.glob("*.yaml"))
        for folder in CONF.rglob("*")
        if folder.is_dir()
    }
    assert found == OPTIONS


def test_every_key_has_a_doc_and_the_default_of_its_option_file():
    base, _ = composed("model=gpt2")
    known = flat(base)
    for key in KEYS.keys() - set(GROUPS):
        assert KEYS[key].doc, key
        assert key not in known or known[key] == KEYS[key].default, key


def test_every_leaf_of_the_config_is_a_key_or_an_argument_of_a_component():
    base, _ = composed()
    for key in flat(base):
        assert key in KEYS or any(key.startswith(f"{path}.") for path in COMPONENTS), key


@pytest.mark.parametrize("choice", ALL_OPTIONS)
def test_every_option_composes_and_validates(choice):
    group, _, option = choice.partition("=")
    values = dict(NEEDS.get(choice, {}))
    if option == OWN:
        values[f"{group.replace('/', '.')}._target_"] = "my_package.Mine"
    config = checked(values, choice)
    assert from_plain(to_plain(config), config.typed_targets) == config


@pytest.mark.parametrize(
    "file", sorted(CONF.rglob("*.yaml")), ids=lambda f: str(f.relative_to(CONF))
)
def test_every_option_file_says_what_it_chooses_and_every_key_what_it_does(file):
    lines = file.read_text().splitlines()
    assert lines[0].startswith("# ")
    assert file.stem != "default"
    if file.name == "config.yaml":
        lines = lines[
            lines.index(
                "command: train # what to do; a bare word is short for it: "
                "train plan, verify, evaluate, export"
            ) :
        ]
        lines = lines[: lines.index("hydra:")]
    for line in lines:
        is_value = re.match(r"\s*\w+: \S", line) and "_target_" not in line
        if is_value and not line.startswith("#"):
            assert " # " in line, line


@pytest.mark.parametrize(
    "file",
    sorted(file for file in CONF.rglob("*.yaml") if "_target_: trainer" in file.read_text()),
    ids=lambda f: str(f.relative_to(CONF)),
)
def test_the_keys_of_an_option_are_the_arguments_of_its_constructor(file):
    keys = yaml.safe_load(file.read_text())
    module, _, name = keys.pop("_target_").rpartition(".")
    parameters = inspect.signature(getattr(importlib.import_module(module), name)).parameters
    assert keys.keys() == parameters.keys() - GIVEN.get(name, set())


def test_nothing_heavy_is_imported():
    heavy = "{'torch', 'numpy', 'hydra'}"
    code = f"import sys, trainer.config.validate; print({heavy} & set(sys.modules))"
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(root)},
    )
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("values", "choices", "line"),
    [
        ({"batch.golbal": 3}, (), "batch.golbal: unknown setting. Did you mean batch.global?"),
        ({"lr": 0.1}, (), "lr: unknown setting. Did you mean optimizer.lr?"),
        ({"batch_size": 8}, (), "batch_size: unknown setting. Did you mean batch.global?"),
        ({"trainer.max_steps": 8}, (), "trainer.max_steps: unknown setting. Did you mean steps?"),
        ({"model.widht": 3}, (), "model.widht: unknown setting. Did you mean model.width?"),
        (
            {"optimizer.rate": 3},
            (),
            "optimizer.rate: unknown setting. optimizer=adamw has lr, weight_decay, groups, betas, "
            "eps",
        ),
        ({"model.layers": 3}, (), "model.layers: unknown setting. Did you mean model.num_layers?"),
        (
            {"objective.qqq": 3},
            (),
            "objective.qqq: unknown setting. objective=next_token has z_loss, label_smoothing",
        ),
        (
            {"accum.steps": 8},
            (),
            "accum.steps=8: not a setting of accum=auto; type accum=fixed accum.steps=8",
        ),
        ({"eval": 20}, (), "eval=20: is a section, not a value; it has every"),
        (
            {"batch.global": {"x": 3}},
            (),
            "batch.global.x: unknown setting. batch.global is one value, batch.global=...",
        ),
        (
            {"batch.global": "abc"},
            (),
            "batch.global=abc: must be a whole number of at least 1, e.g. 512",
        ),
        (
            {"batch.global": "512k"},
            (),
            "batch.global=512k: must be a whole number of at least 1, e.g. 512",
        ),
        (
            {"batch.global": 1.5},
            (),
            "batch.global=1.5: must be a whole number of at least 1, e.g. 512",
        ),
        (
            {"batch.global": True},
            (),
            "batch.global=true: must be a whole number of at least 1, e.g. 512",
        ),
        (
            {"batch.global": None},
            (),
            "batch.global=null: needs a whole number of at least 1, e.g. 512",
        ),
        ({"batch.tail": "dorp"}, (), "batch.tail=dorp: must be keep or drop. Did you mean drop?"),
        ({"seed": -1}, (), "seed=-1: must be a whole number from 0 to 2**63 - 1, e.g. 0"),
        ({"compile": "yes"}, (), "compile=yes: must be true or false"),
        ({"clip_norm": 0}, (), "clip_norm=0: must be a number above 0 or null, e.g. 1.0"),
        ({"name": "a/b"}, (), "name=a/b: must be one word of letters, digits, -, _ and . or null"),
        ({"outputs": "../x"}, (), "outputs=../x: must not lead upwards with .."),
        (
            {"model.width": 1.5},
            (),
            "model.width=1.5: must be a whole number of at least 1, e.g. 96",
        ),
        ({"model.tied": 1}, (), "model.tied=1: must be true or false"),
        (
            {"model.dropout": "x"},
            (),
            "model.dropout=x: must be a share of at least 0 and below 1, e.g. 0.0",
        ),
        (
            {"optimizer.betas": 3},
            (),
            "optimizer.betas=3: must be two shares of at least 0 and below 1, e.g. [0.9,0.95]",
        ),
        ({"optimizer.lr": -1}, (), "optimizer.lr=-1: must be a number, 0 or more, e.g. 0.012"),
        (
            {"data.max_length": None},
            (),
            "data.max_length=null: must be a whole number of at least 2: a token and the next, "
            "e.g. 256",
        ),
        (
            {"data.holdout": 1},
            (),
            "data.holdout=1: must be a share of at least 0 and below 1, e.g. 0.05",
        ),
        ({"accum.memory": "80G"}, (), "accum.memory=80G: must be a size such as 80GiB or null"),
        ({}, ("data=text",), "data.path: data=text needs it, data.path=..."),
        ({}, ("model=own",), "model=own: no class is named; type model._target_=package.Class"),
        (
            {"model._target_": "Net"},
            ("model=own",),
            "model._target_=Net: must be the import path of a class: package.Class",
        ),
        (
            {"model._target_": "pkg.Net", "model._recursive_": True},
            ("model=own",),
            "model._recursive_: _recursive_ is not for a config; _target_ and _partial_ are read",
        ),
        (
            {"steps": 3, "epochs": 2},
            (),
            "steps=3: epochs=2 is set too; at most one, type epochs=null",
        ),
        (
            {},
            ("accum=fixed",),
            "accum.micro: accum=fixed needs accum.micro (samples per micro-batch) or accum.steps "
            "(micro-batches per rank), e.g. accum.micro=8",
        ),
        (
            {},
            ("accum=budget",),
            "accum.max_tokens: accum=budget needs the padded tokens of the largest micro-batch, "
            "e.g. accum.max_tokens=8192",
        ),
        (
            {"batch.normalizer": "micro_batches"},
            (),
            "batch.normalizer=micro_batches: accum=auto sorts by length, and a mean of means would "
            "depend on it; type accum=fixed accum.micro=8",
        ),
        (
            {"batchnorm": "micro"},
            (),
            "batchnorm=micro: depends on how the batch is cut; type accum=fixed accum.micro=8",
        ),
        (
            {"activation_checkpointing": "auto", "accum.micro": 8},
            ("accum=fixed",),
            "activation_checkpointing=auto: weighed against smaller micro-batches, which only "
            "accum=auto chooses; type accum=auto, or activation_checkpointing=true",
        ),
        (
            {"device": "cuda"},
            (),
            "device=cuda: no GPU is usable here; use device=cpu or device=auto, or plan for one "
            "that is not here: train plan device=cuda accum.memory=80GiB",
        ),
        (
            {"parallel.ranks": 2},
            ("sync=hierarchical",),
            "sync=hierarchical: needs copies of the model; use parallel=hsdp",
        ),
        (
            {"deterministic": "layout", "accum.micro": 8},
            ("accum=fixed", "parallel=fsdp"),
            "deterministic=layout: sums whole gradients; use parallel=ddp, not fsdp",
        ),
        ({"parallel.shard": 2}, (), "parallel.shard=2: counts only with parallel=hsdp"),
        (
            {"parallel.ranks": 2},
            ("parallel=none",),
            "parallel.ranks=2: parallel=none is one rank; use parallel=ddp",
        ),
        (
            {"deterministic": "layout"},
            (),
            "deterministic=layout: needs fixed micro-batches; type accum=fixed accum.micro=8",
        ),
        (
            {"command": "evaluate"},
            (),
            "run: train evaluate needs a run folder: run=outputs/... or run=auto",
        ),
        (
            {"run": "a"},
            (),
            "run=a: read by evaluate, export and verify; to go on with a run: resume=",
        ),
        (
            {"init": "a", "resume": "b"},
            (),
            "init=a: starts a new run; resume= goes on with an old one",
        ),
        (
            {"optimizer.groups": {"a": {"frozen": True, "lr": 1}}},
            (),
            "optimizer.groups['a']: frozen parameters have neither lr nor weight_decay; leave "
            "these out",
        ),
        ({"hooks": [3]}, (), "hooks=[3]: must be a list"),
        ({"trust": [1]}, (), "trust=[1]: must be a list, e.g. [a,b]"),
    ],
)
def test_a_mistake_is_one_line_with_the_key_first(values, choices, line):
    assert faults_of(values, *choices) == [line]


LINES = {
    "acum=auto": "acum: unknown setting. Did you mean accum?",
    "accum.mirco=8": "accum.mirco: unknown setting. Did you mean accum.micro?",
    "batch_size=8": "batch_size: unknown setting. Did you mean batch.global?",
    "gradient_accumulation_steps=4": "Did you mean accum.steps?",
    "choices=3": "choices: unknown setting",
    "optimizer._target_=trainer.optim.optimizers.SGD optimizer.lr=-1": "optimizer.lr=-1: must be",
    "scheduler._target_=trainer.optim.schedules.WSD scheduler.decay=-0.1": "scheduler.decay=-0.1:",
    "scheduler.scale=lineer": "scheduler.scale=lineer: must be none, linear or sqrt. Did you mean",
    "scheduler=wsd scheduler.floor=2": "scheduler.floor=2: must be a share from 0 to 1",
    "objective.z_loss=much": "objective.z_loss=much: must be a number, 0 or more",
    "optimizer.betas=[0.9,0.9,0.9]": "must be two shares",
    "BATCH.GLOBAL=8": "BATCH.GLOBAL: unknown setting. Did you mean batch.global?",
    "optimizer.betas=0.9": "optimizer.betas=0.9: must be two shares",
    "weight_decay=0.1": "Did you mean optimizer.weight_decay?",
    "max_steps=10": "Did you mean steps?",
    "epoch=3": "Did you mean epochs?",
    "data.path=book.txt": "not a setting of data=stdlib; type data=text data.path=book.txt",
    "model.layers=4": "Did you mean model.num_layers?",
    "log=true": "log=true: is a section, not a value; it has every, samples",
    "wandb=online": "wandb=online: is a section, not a value; it has mode",
    "compile=flase": "compile=flase: must be true or false. Did you mean false?",
    "batch.global=0": "batch.global=0: must be",
    "batch.unit=words": "batch.unit=words: must be samples or tokens",
    "batch.tail=drp": "Did you mean drop?",
    "accum.memory=80Gib": "accum.memory=80Gib: must be",
    "model.width=abc": "model.width=abc: must be",
    "model._target_=": "must be the import path of a class",
    "data.holdout=2": "data.holdout=2: must be",
    "data.on_bad=ignore": "data.on_bad=ignore: must be stop or skip",
    "optimizer.lr=abc": "optimizer.lr=abc: must be",
    "scheduler.warmup=1.5": "scheduler.warmup=1.5: must be",
    "steps=0": "steps=0: must be",
    "precision=bf61": "precision=bf61: must be fp32 or bf16. Did you mean bf16?",
    "compile=maybe": "compile=maybe: must be true or false",
    "wandb.mode=off": "Did you mean disabled?",
    "eval.every=0": "eval.every=0: must be",
    "num_workers=-1": "num_workers=-1: must be",
    "wandb.mode=ofline": "Did you mean offline?",
    "wandb.tags=3": "wandb.tags=3: must be a list",
    "hooks=3": "hooks=3: must be a list",
    "resume_allow=3": "resume_allow=3: must be a list",
    "command=trian": "Did you mean train?",
    "optimizer.lr=-0.1": "optimizer.lr=-0.1: must be a number, 0 or more",
    "epochs=1.5": "epochs=1.5: must be a whole number of at least 1 or null",
    "steps=ten": "steps=ten: must be a whole number",
    "seed=None": "seed=None: must be a whole number",
    "hooks=mine.Watch": "Did you mean hooks=[mine.Watch]?",
    "device=cuda:1": "Did you mean cuda?",
    "deterministic=full": "must be true, false or layout",
    "accum.memory=-1": "accum.memory=-1: must be a size such as 80GiB",
    "accum.max_tokens=100": "not a setting of accum=auto; type accum=budget",
    "parallel.ranks=two": "parallel.ranks=two: must be auto or a whole number",
    "parallel.timeout_s=0": "parallel.timeout_s=0: must be a number above 0",
    "parallel.max_restarts=-1": "parallel.max_restarts=-1: must be a whole number, 0 or more",
    "parallel.shard=3": "parallel.shard=3: counts only with parallel=hsdp",
    "checkpoint.every=soon": "must be a time, a number of steps or a share of the run",
    "checkpoint.every=nan": "checkpoint.every=NaN: must be a time",
    "eval.every=nan": "eval.every=NaN: must be a whole number of steps",
    "scheduler.warmup=nan": "scheduler.warmup=NaN: must be a",
    "scheduler.warmup=50": "is more than steps=32; the largest valid value is 32",
    "model.width=0": "model.width=0: must be a whole number of at least 1",
    "model.dropout=1.5": "model.dropout=1.5: must be a share of at least 0 and below 1",
    "model.mlp=gleu": "model.mlp=gleu: must be swiglu or gelu. Did you mean gelu?",
    "data.max_length=1": "must be a whole number of at least 2: a token and the next",
    "data=tokens data.path=.": "model.vocab_size: token files do not say",
    "objective.label_smoothing=1": "label_smoothing=1: must be a share of at least 0 and below 1",
    "objective=classify objective.class_weights=[-1,2]": "a list of numbers, 0 or more, one per",
    "objective=model_loss objective.reduction=max": "must be sum or mean",
    "optimizer.betas=[0.9]": "optimizer.betas=[0.9]: must be two shares",
    "optimizer.betas=[0.9,1]": "must be two shares of at least 0 and below 1, e.g. [0.9,0.95]",
    "optimizer=sgd optimizer.nesterov=true optimizer.momentum=0": "type optimizer.momentum=0.9",
    "scheduler.scale=linear": "scheduler.reference_batch: scheduler.scale=linear needs the global",
    "scheduler=wsd scheduler.decay=0.9 scheduler.warmup=16": "the largest valid value is 0.5",
    "parallel=hsdp parallel.ranks=4 parallel.shard=3": "parallel.shard=2 parallel.replicate=2",
    "checkpoint.keep=0": "checkpoint.keep=0: must be a whole number of at least 1",
    "checkpoint.on_full=ignore": "must be stop or continue",
    "accum=budget accum.max_tokens=900 activation_checkpointing=auto": "type accum=auto, or",
    "data.max_length=0": "data.max_length=0: must be a whole number of at least 2",
    "data=text data.path=x data.holdout=1.0": "data.holdout=1.0: must be a share",
    "model._target_=net:Net": "must be the import path of a class: package.Class",
    "batchnorm=layer": "batchnorm=layer: must be micro or null",
    "accum=budget": "accum=budget needs",
    "accum=auto accum.steps=8": "accum.steps=8: not a setting of accum=auto; type accum=fixed",
    "accum=fixed accum.micro=7 accum.steps=3 batch.global=22": "nearest sizes that agree",
    "batchnorm=micro": "type accum=fixed accum.micro=8",
    "export.to=weights": "export.to=weights: written by train export run=RUN alone",
    "batch.schedule=null": "batch.schedule: unknown setting",
    "batchnorm=ghost": "batchnorm=ghost: must be micro or null",
    "bs=64": "bs: unknown setting. Did you mean batch.global?",
}
"""Lines as they are typed, with what the answer holds."""


def typed(line: str) -> tuple[dict[str, Any], list[str]]:
    """Values and choices of options of a line."""
    values: dict[str, Any] = {}
    choices = []
    for word in line.split():
        key, _, value = word.partition("=")
        if key in GROUPS:
            choices.append(f"{key.replace('.', '/')}={value}")
        else:
            values[key] = float("nan") if value == "nan" else yaml.safe_load(value or '""')
    return values, choices


@pytest.mark.parametrize(("line", "text"), LINES.items(), ids=LINES)
def test_what_is_wrong_is_answered_with_what_to_type(line, text):
    values, choices = typed(line)
    assert any(text in fault for fault in faults_of(values, *choices))


@pytest.mark.parametrize("cut", ["accum=fixed", "accum=auto", "accum=budget"])
def test_a_gpu_that_is_not_here_can_be_planned_for(cut):
    sizes = {"accum=fixed": "accum.micro", "accum=auto": "accum.memory"}
    values = {"device": "cuda", "command": "plan", sizes.get(cut, "accum.max_tokens"): 4096}
    assert checked(values, cut).device == "cuda"


def test_all_faults_come_at_once():
    values = {"batch.golbal": 3, "seed": -1, "model.width": "x", "steps": 2, "epochs": 2}
    assert {fault.split("=")[0].split(":")[0] for fault in faults_of(values)} == set(values) - {
        "epochs"
    }


@pytest.mark.parametrize(
    ("values", "key", "read"),
    [
        ({"batch.global": 1e3}, "batch.global", 1000),
        ({"model.width": 1.2e2}, "model.width", 120),
        ({"optimizer.lr": 1}, "optimizer.lr", 1.0),
        ({"accum.memory": "80GiB"}, "accum.memory", 80 * 2**30),
        ({"name": 2026}, "name", "2026"),
        ({"trust": "mine"}, "trust", ("mine",)),
        ({"clip_norm": None}, "clip_norm", None),
        ({"parallel.timeout_s": 5}, "parallel.timeout_s", 5.0),
    ],
)
def test_a_value_is_read_as_what_it_stands_for(values, key, read):
    config = checked(values)
    found = config.trust if key == "trust" else lookup(to_plain(config), key)
    assert found == read
    assert type(found) is type(read)


@pytest.mark.parametrize(
    ("text", "size"),
    [("1B", 1), ("2 KB", 2000), ("1.5MiB", 3 * 2**19), ("80GiB", 80 * 2**30), ("1TB", 10**12)],
)
def test_sizes_of_memory_are_read(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["80", "80G", "GiB", "-1GiB", "1iB", "1 024KB"])
def test_what_is_no_size_of_memory_stays_what_it_is(text):
    assert parse_bytes(text) == text


def test_a_class_of_ones_own_takes_whatever_its_constructor_knows():
    config = checked({"model._target_": "pkg.Net", "model.width": "any"}, "model=own")
    assert config.model.params == {"width": "any"}
    assert config.model.typed_target
    assert config.model.name is None
    assert config.typed_targets == {"model"}


def test_a_cut_of_ones_own_keeps_the_program_s_own_keys():
    config = checked({"accum._target_": "pkg.Cut", "accum.sizes": [1, 2]}, "accum=own")
    assert config.accum.params == {"sizes": [1, 2]}
    assert config.accum.gradient.target == "trainer.accumulate.sum.Sum"
    assert config.accum.packed == "auto"


def test_a_program_s_own_key_is_checked_beside_a_class_of_ones_own():
    values = {"data._target_": "pkg.Data", "data.on_bad": "skp"}
    assert faults_of(values, "data=own") == [
        "data.on_bad=skp: must be stop or skip. Did you mean skip?"
    ]


def test_hooks_are_named_by_class_or_with_arguments():
    config = checked({"hooks": ["pkg.A", {"_target_": "pkg.B", "path": "x"}]})
    assert [(hook.target, hook.params) for hook in config.hooks] == [
        ("pkg.A", {}),
        ("pkg.B", {"path": "x"}),
    ]
    assert not any(hook.typed_target for hook in config.hooks)


def test_a_mapping_that_is_empty_in_its_option_takes_any_key():
    groups = {"*.embedding.*": {"lr": 1e-3}}
    assert checked({"optimizer.groups": groups}).optimizer.params["groups"] == groups


def test_the_default_global_batch_gives_way_to_micro_and_steps():
    config = checked({"accum.micro": 4, "accum.steps": 3}, "accum=fixed")
    assert config.batch.global_batch is None
    filled = config.with_global_batch(world_size=2)
    assert filled.batch.global_batch == 24
    assert filled.with_global_batch(world_size=4).batch.global_batch == 24


def test_typed_sizes_stay_and_the_third_follows():
    config = checked({"batch.global": 100, "accum.micro": 8}, "accum=fixed")
    assert config.with_global_batch(1).batch.global_batch == 100
    assert config.accum.params == {"micro": 8, "steps": None}


def test_only_three_typed_sizes_can_contradict():
    values = {"batch.global": 100, "accum.micro": 8, "accum.steps": 3, "device": "cpu"}
    (fault,) = faults_of(values, "accum=fixed")
    assert fault.startswith("accum.steps: 3 micro-batches of 8 samples")
    assert "batch.global=24" in fault


def test_a_resumed_run_keeps_its_global_batch_when_only_steps_are_typed():
    base, picked = composed("accum=fixed")
    base = copy.deepcopy(base)
    put(base, "batch.global", 96)
    put(base, "accum.micro", 8)
    raw = copy.deepcopy(base)
    put(raw, "accum.steps", 3)
    config = validate(raw, base, (), picked, {"accum.steps"})
    assert config.batch.global_batch == 96
    assert config.accum.params == {"micro": None, "steps": 3}


def test_sizes_under_tokens_take_one_of_micro_and_steps():
    values = {"accum.micro": 8, "accum.steps": 3}
    (fault,) = faults_of(values, "batch=tokens", "accum=fixed")
    assert fault == "accum.steps=3: with batch.unit=tokens, set this or accum.micro"


def test_wandb_mode_in_the_environment_beats_the_default_and_yields_to_the_command_line(
    monkeypatch,
):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert checked().wandb.mode == "disabled"
    assert checked({"wandb.mode": "offline"}).wandb.mode == "offline"


def test_a_secret_of_the_environment_is_refused_and_not_shown(monkeypatch):
    secret = "0123456789abcdef0123"
    monkeypatch.setenv("WANDB_API_KEY", secret)
    (fault,) = faults_of({"wandb.project": f"x-{secret}"})
    assert "$WANDB_API_KEY" in fault
    assert secret not in fault


def test_consent_is_never_written_and_never_read_back():
    values = {"model._target_": "pkg.Net", "trust": ["pkg"]}
    config = checked(values, "model=own")
    plain = json.loads(json.dumps(to_plain(config)))
    assert "trust" not in plain
    assert not from_plain(plain).model.typed_target
    assert from_plain(plain).trust == ()
    assert from_plain(plain, config.typed_targets, config.trust) == config


def test_a_config_of_another_version_is_refused_by_name():
    plain = to_plain(checked())
    plain["batch"]["golbal"] = 3
    with pytest.raises(ConfigError, match=r"batch\.golbal: unknown setting\. Did you mean"):
        from_plain(plain)


def test_the_clock_has_a_default():
    assert (checked().steps, checked().total_epochs) == (32, None)
    other = checked({}, "model=gpt2")
    assert (other.steps, other.total_epochs) == (None, 1)
    assert (checked({}, "epochs=2").steps, checked({}, "epochs=2").total_epochs) == (None, 2)


EXECUTION = {
    "accum.micro": 4,
    "activation_checkpointing": True,
    "checkpoint.every": 7,
    "compile": True,
    "device": "cpu",
    "log.samples": True,
    "name": "b",
    "num_workers": 3,
    "parallel.timeout_s": 9.0,
}
STEP = {
    "batch.global": 64,
    "batch.tail": "drop",
    "clip_norm": None,
    "data.max_length": 128,
    "model.width": 48,
    "objective.z_loss": 0.1,
    "optimizer.lr": 0.1,
    "precision": "bf16",
    "scheduler.warmup": 2,
    "seed": 1,
}


@pytest.mark.parametrize("key", EXECUTION)
def test_execution_is_no_part_of_the_contract(key):
    assert contract(checked({key: EXECUTION[key]})) == contract(checked())


@pytest.mark.parametrize("key", STEP)
def test_what_changes_the_step_is_refused_by_name_unless_it_is_allowed(key):
    old, new = contract(checked()), contract(checked({key: STEP[key]}))
    assert [line.split("=")[0] for line in contract_diff(old, new)] == [key]
    assert contract_diff(old, new, [key]) == []
    assert contract_diff(old, new, [key.split(".")[0]]) == []


@pytest.mark.parametrize("size", ["accum.micro", "accum.steps"])
@pytest.mark.parametrize(
    ("values", "picks", "has_batch_statistics"),
    [
        ({"batch.normalizer": "micro_batches"}, (), False),
        ({"batchnorm": "micro"}, (), False),
        ({}, (), True),
    ],
)
def test_the_cut_is_part_of_the_contract_where_the_step_depends_on_it(
    values, picks, has_batch_statistics, size
):
    two, four = (
        contract(
            checked({**values, size: count}, "accum=fixed", *picks),
            has_batch_statistics=has_batch_statistics,
        )
        for count in (2, 4)
    )
    assert [line.split("=")[0] for line in contract_diff(two, four)] == [size]
    assert contract_diff(two, four, [size]) == []


def test_so_is_the_number_of_ranks_there():
    one, two = (contract(checked(), has_batch_statistics=True, ranks=n) for n in (1, 2))
    assert [line.split("=")[0] for line in contract_diff(one, two)] == ["parallel.ranks"]
    assert contract_diff(one, two, ["parallel"]) == []
    assert contract(checked(), ranks=1) == contract(checked(), ranks=2)


def test_steps_may_grow_and_not_shrink():
    short, long = contract(checked({"steps": 10})), contract(checked({"steps": 20}))
    assert contract_diff(short, long) == []
    assert contract_diff(long, short) == [
        "steps=10: the run has 20; may only grow; to change it, resume_allow=[steps]"
    ]


def test_a_hash_tells_contracts_apart():
    one, same, other = (contract(checked(c)) for c in ({}, {"device": "cpu"}, {"seed": 1}))
    assert config_hash(one) == config_hash(json.loads(json.dumps(same))) != config_hash(other)


def test_a_contract_survives_json():
    terms = contract(checked({"optimizer.betas": [0.8, 0.9]}))
    assert json.loads(json.dumps(terms)) == terms


NAMES = st.sampled_from(sorted(KEYS.keys() - set(GROUPS)) + sorted(flat(composed()[0])))
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 10**6),
    st.floats(allow_nan=True),
    st.text(max_size=300),
    st.sampled_from(["auto", "80GiB", "1e3", "tokens", "fixed", "???", "${x}", "pkg.Net"]),
    st.lists(st.integers(0, 3), max_size=3),
    st.dictionaries(st.sampled_from(["a", "_target_", "mode"]), st.integers(), max_size=2),
)


@settings(max_examples=150)
@given(st.dictionaries(st.one_of(NAMES, st.text("abcdef._", min_size=1)), VALUES, max_size=4))
def test_whatever_is_typed_gives_a_config_or_short_lines(values):
    values = {key: value for key, value in values.items() if all(key.split("."))}
    base, picked = composed()
    raw = copy.deepcopy(base)
    for key, value in values.items():
        try:
            put(raw, key, value)
        except (TypeError, AttributeError):
            continue
    faults: tuple[str, ...] = ()
    try:
        validate(raw, base, (), picked, values.keys())
    except ConfigError as error:
        faults = error.faults
        answered = bool(faults)
    else:
        answered = True
    assert answered
    assert all(0 < len(line) <= LINE_LIMIT and "\n" not in line for line in faults)


VALID = st.fixed_dictionaries(
    {},
    optional={
        "batch.global": st.integers(1, 10**9),
        "batch.tail": st.sampled_from(["keep", "drop"]),
        "accum.micro": st.none() | st.integers(1, 99),
        "accum.memory": st.none() | st.integers(1, 2**50),
        "model.width": st.integers(1, 166).map(lambda heads_of_three: 6 * heads_of_three),
        "model.dropout": st.floats(0, 0.9),
        "optimizer.lr": st.floats(0, 10),
        "optimizer.betas": st.lists(st.floats(0, 0.99), min_size=2, max_size=2),
        "optimizer.groups": st.dictionaries(
            st.text("ab.*", min_size=1), st.fixed_dictionaries({"lr": st.floats(0, 1)}), max_size=2
        ),
        "name": st.none() | st.from_regex(r"[a-z][a-z0-9._-]{0,8}", fullmatch=True),
        "clip_norm": st.none() | st.floats(1e-6, 1e6),
        "steps": st.none() | st.integers(1, 10**6),
        "seed": st.integers(0, 2**63 - 1),
        "deterministic": st.booleans(),
        "num_workers": st.just("auto") | st.integers(0, 8),
        "hooks": st.lists(
            st.just("pkg.Hook") | st.just({"_target_": "pkg.Hook", "x": [1]}), max_size=2
        ),
        "wandb.tags": st.lists(st.text(max_size=5), max_size=3),
        "resume_allow": st.lists(st.just("batch.global"), max_size=1),
    },
)


@settings(max_examples=60)
@given(VALID)
def test_a_config_survives_the_way_to_its_file_and_back(values):
    config = checked(values)
    plain = json.loads(json.dumps(to_plain(config)))
    assert from_plain(plain) == config
    assert to_plain(from_plain(plain)) == to_plain(config)


TREES = st.recursive(
    st.integers(),
    lambda inner: st.dictionaries(st.text("abc", min_size=1), inner, min_size=1),
    max_leaves=8,
).filter(lambda tree: isinstance(tree, dict))


@given(TREES, st.data())
def test_pruning_removes_exactly_the_named_leaves(tree, data):
    leaves = flat(tree)
    drop = set(data.draw(st.lists(st.sampled_from(sorted(leaves)), unique=True)))
    assert flat(prune(tree, drop)) == {k: v for k, v in leaves.items() if k not in drop}


@given(st.one_of(st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False)))
def test_a_value_is_of_its_own_type(value):
    assert convert(type_like(value), value) == value


def test_the_nearest_key_is_offered_and_nothing_where_none_is_near():
    assert did_you_mean("stpes", ["steps", "seed"]) == " Did you mean steps?"
    assert did_you_mean("zzz", ["steps", "seed"]) == ""
