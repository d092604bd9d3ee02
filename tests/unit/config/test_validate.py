"""Configs: what a value is read as, and what a mistake is answered with."""

from __future__ import annotations

import copy
import json

import pytest

from tests.lib.cli_support import prepared
from tests.lib.config_support import checked, faults_of, options, put
from trainer.config.components import parse_bytes
from trainer.config.messages import lookup
from trainer.config.run_config import to_plain
from trainer.config.validate import from_plain, validate
from trainer.core.errors import ConfigError


@pytest.fixture(autouse=True)
def quiet_environment(monkeypatch):
    for name in ("WANDB_MODE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


FAULTS = {
    "lr=0.1": ": unknown setting. Did you mean optimizer.lr?",
    "model.widht=3": ": unknown setting. Did you mean model.width?",
    "optimizer.rate=3": ": unknown setting. optimizer=adamw has lr, weight_decay, groups, "
    "layer_decay, betas, eps",
    "accum.steps=8": ": not a setting of accum=auto; type accum=fixed accum.steps=8",
    "eval=20": ": is a section, not a value; it has every",
    "batchnorm.group=1": ": must be a whole number of at least 2: one sample has no variance",
    "batch.global=abc": ": must be a whole number of at least 1, e.g. 512",
    "batch.global=null": ": needs a whole number of at least 1, e.g. 512",
    "batch.tail=dorp": ": must be keep or drop. Did you mean drop?",
    "seed=-1": ": must be a whole number from 0 to 2**63 - 1, e.g. 0",
    "deterministic=full": ": must be true, false or layout",
    "clip_norm=0": ": must be a number above 0 or null, e.g. 1.0",
    "outputs=../x": ": must not lead upwards with .., or begin with ~",
    "wandb.tags=3": ": must be a list, e.g. [a,b]",
    "eval.every=nan": "eval.every=NaN: must be a number of steps (1, not 1.0), a fraction of",
    "checkpoint.every=soon": ": must be a number of steps (1, not 1.0), a fraction of the run "
    "below 1, a time such as 10min, epochs such as 1epoch or null, e.g. ",
    "checkpoint.every=0s": ": must be a number of steps (1, not 1.0), a fraction of the run below",
    "checkpoint.every=00.0min": "checkpoint.every=00.0min: must be a number of steps (1, not 1.0)",
    'optimizer.groups={"a":{"rl":3}}': "optimizer.groups={a: {rl: 3}}: must be a mapping of name",
    "optimizer._target_=trainer.optim.optimizers.SGD optimizer.lr=-1": "optimizer.lr=-1: must be "
    "a number, 0 or more",
    "accum.memory=80": ": must be a size such as 80GiB or null. Did you mean 80GiB?",
    "accum.memory=512M": ": must be a size such as 80GiB or null. Did you mean 512MiB?",
    "device=gpu": ": must be auto, cpu, cuda or a card to plan for, e.g. h100. Did you mean cuda?",
    "trainer.max_epochs=3": ": unknown setting. Did you mean epochs?",
    "gradient_clip_val=1": ": unknown setting. Did you mean clip_norm?",
    "model._target_=net:Net": ": must be the import path of a class: package.Class",
    "model=own": "model._target_=null: must be the import path of a class: package.Class",
    "data._target_=pkg.Data data.on_bad=skp": "data.on_bad=skp: must be stop or skip. Did you "
    "mean skip?",
    "data=text": "data.path: data=text needs it, data.path=...",
    "steps=3 epochs=2": "steps=3: epochs is set too; at most one, type epochs=null",
    "accum=fixed": "accum.micro=null: accum=fixed needs the number of samples per "
    "micro-batch, e.g. 8, or accum.steps",
    "batch=tokens accum=fixed accum.micro=8 accum.steps=3": "accum.steps=3: with batch.unit=tokens",
    "batch.normalizer=micro_batches": ": depends on the micro-batch size; type accum=fixed",
    "batchnorm=micro": ": depends on the micro-batch size; type accum=fixed",
    "accum=fixed accum.micro=8 activation_checkpointing=auto": "activation_checkpointing=auto: "
    "needs accum=auto",
    "device=cuda": ": no GPU is usable here; use device=cpu or device=auto, or plan for one that "
    "is not here: train plan device=h100",
    "command=plan device=cuda": "device=cuda: no GPU is here, so its memory is not known; name a "
    "card to plan for, e.g. device=h100, or type accum.memory=80GiB",
    "device=h100": ": names a card for train plan; a run takes device=cuda or auto",
    "parallel.ranks=2 sync=hierarchical": "sync=hierarchical: needs copies of the model; use "
    "parallel=hsdp",
    "deterministic=layout accum=fixed accum.micro=8 parallel=fsdp": "deterministic=layout: needs "
    "parallel=ddp",
    "deterministic=layout": ": needs fixed micro-batches; type accum=fixed accum.micro=8",
    "sync=overlapped parallel=fsdp": "sync=overlapped: needs parallel=ddp, without deterministic",
    "parallel.shard=2": ": has an effect only with parallel=hsdp",
    "parallel=hsdp parallel.ranks=4 parallel.shard=3": "parallel.shard=3: times "
    "parallel.replicate=1 must be the 4 ranks of the run; e.g. parallel.shard=2 "
    "parallel.replicate=2",
    "parallel=none parallel.ranks=2": "parallel.ranks=2: parallel=none is one rank; use "
    "parallel=ddp",
    "scheduler.scale=linear": ": needs scheduler.reference_batch, the global batch that "
    "optimizer.lr was tuned for",
    "scheduler.warmup=50": ": exceeds the run's 32 steps; the largest valid value is 32",
    "scheduler=wsd scheduler.decay=0.9 scheduler.warmup=16": "scheduler.decay=0.9: 29 steps of "
    "decay and 16 of warm-up exceed the run's 32 steps; the largest valid value is 0.5",
    "optimizer=sgd optimizer.nesterov=true optimizer.momentum=0": "optimizer.nesterov=true: needs "
    "a momentum; type optimizer.momentum=0.9",
    "model.num_heads=5": "model.width, model.num_heads: width 96 cannot be split over 5 heads "
    "of even size, as rotary positions need; nearest: model.width=100 or model.num_heads=4",
    "command=evaluate": ": needs run=outputs/... or run=auto",
    "run=a": ": read by evaluate, export, plan and verify; to go on with a run: resume=",
    "stop.patience=5": ": needs a metric: type stop.metric=eval_loss",
    "stop.min_delta=0.1": ": needs a metric: type stop.metric=eval_loss",
    "checkpoint.mode=max": ": needs a metric: type checkpoint.best=eval_loss",
    "checkpoint.best=eval_a checkpoint.mode=max stop.metric=eval_b": "stop.metric=eval_b: no such "
    "metric is known. For one of your own, type checkpoint.mode=min or checkpoint.mode=max (where",
    "export.to=a": ": used only by train export run=RUN; leave it out",
    "init=a resume=b": "init=a: starts a new run; resume= goes on with an old one",
    "step=3": ": picks a checkpoint of run=, init= or resume=RUN; for the length of a run",
}
"""Lines as they are typed, with how the answer begins, behind what was typed or its key."""

WRONG = """
batch.global=true batch.global=0 compile=maybe name=a/b steps=0 device=cuda:1 hooks=[3]
num_workers=-1 eval.every=0 eval.samples=0 eval.at_start=1 scheduler.warmup=1.5
parallel.ranks=two parallel.timeout_s=0
data.holdout=1 data.max_length=1 model.width=1.5 model.tied=1 optimizer.betas=[0.9,1]
eval.every=1.0 checkpoint.every=1.0 log.every=1.0 scheduler.warmup=1.0
optimizer.lr=-1 batch.global=1.5 model.dropout=x hooks=3 trust=[1] precision=bf61
"""


def test_a_mistake_is_one_line_with_the_key_first():
    for line, answer in FAULTS.items():
        (fault,) = faults_of(line)
        begins = [line, line.partition("=")[0]] if answer.startswith(":") else [""]
        assert any(fault.startswith(begin + answer) for begin in begins), (line, fault)
    for line in WRONG.split():
        (fault,) = faults_of(line)
        assert fault.startswith(f"{line}: must be "), fault


READ = {
    "batch.global": (1e3, 1000),
    "model.width": (1.2e2, 120),
    "optimizer.lr": (1, 1.0),
    "accum.memory": ("80GiB", 80 * 2**30),
    "name": (2026, "2026"),
    "wandb.tags": ("mine", ["mine"]),
    "clip_norm": (None, None),
    "parallel.timeout_s": (5, 5.0),
    "checkpoint.every": ("90 s", "90 s"),
    "eval.every": (7, 7),
    "log.every": (1e2, 100),
    "scheduler.warmup": (1, 1),
    "optimizer.betas": 2 * ([0.8, 0.9],),
    "optimizer.groups": 2 * ({"*.embedding.*": {"lr": 1e-3}},),
    "hooks": (["pkg.A"], [{"_target_": "pkg.A"}]),
}


def test_a_value_is_read_as_what_it_stands_for_and_survives_the_way_to_its_file_and_back():
    config = checked({key: value for key, (value, _) in READ.items()})
    plain = json.loads(json.dumps(to_plain(config)))
    assert from_plain(plain) == config
    del plain["ema"]  # as in a run that was begun before there was one
    assert from_plain(plain) == config
    del plain["log"]["noise_scale"]  # likewise, and it is off
    assert from_plain(plain).log.noise_scale is None
    plain["log"] = dict(to_plain(config)["log"])
    for key, (_, read) in READ.items():
        found = lookup(plain, key)
        assert found == read
        assert type(found) is type(read)


def test_sizes_of_memory_are_read_and_all_else_stays_what_it_is():
    sizes = {"1B": 1, "2 KB": 2000, "1.5MiB": 3 * 2**19, "80GiB": 80 * 2**30, "1TB": 10**12}
    sizes |= {text: text for text in ("80", "80G", "GiB", "-1GiB", "1iB", "1 024KB")}
    assert {text: parse_bytes(text) for text in sizes} == sizes


def test_a_class_of_ones_own_takes_whatever_its_constructor_knows():
    config = checked({"model._target_": "pkg.Net", "model.width": "any"}, "model=own")
    assert config.model.params == {"width": "any"}
    assert config.model.typed_target
    assert config.model.name is None
    cut = checked({"accum._target_": "pkg.Cut", "accum.sizes": [1, 2]}, "accum=own").accum
    assert cut.params == {"sizes": [1, 2]}
    assert cut.gradient.target == "trainer.accumulate.two_pass.by_coupling"
    assert cut.packed == "auto"
    hooks = checked({"hooks": ["pkg.A", {"_target_": "pkg.B", "path": "x"}]}).hooks
    found = [(hook.target, hook.params, hook.typed_target) for hook in hooks]
    assert found == [("pkg.A", {}, False), ("pkg.B", {"path": "x"}, False)]


def test_of_three_sizes_the_one_that_was_not_typed_gives_way():
    config = checked({"accum.micro": 4, "accum.steps": 3}, "accum=fixed")
    assert config.batch.global_batch is None
    filled = config.with_global_batch(world_size=2)
    assert filled.batch.global_batch == 24
    assert filled.with_global_batch(world_size=4).batch.global_batch == 24
    config = checked({"batch.global": 100, "accum.micro": 8}, "accum=fixed")
    assert config.with_global_batch(1).batch.global_batch == 100
    assert config.accum.params == {"micro": 8, "steps": None}
    (fault,) = faults_of("accum=fixed batch.global=100 accum.micro=8 accum.steps=3 device=cpu")
    assert fault.startswith("accum.steps=3: batch.global=100 gives")
    assert "batch.global=24" in fault


def test_a_resumed_run_keeps_its_global_batch_when_only_steps_are_typed():
    base, picked = options("accum=fixed")
    base = copy.deepcopy(base)
    put(base, "batch.global", 96)
    put(base, "accum.micro", 8)
    raw = copy.deepcopy(base)
    put(raw, "accum.steps", 3)
    config = validate(raw, base, (), picked, {"accum.steps"})
    assert config.batch.global_batch == 96
    assert config.accum.params == {"micro": None, "steps": 3}


def test_wandb_mode_in_the_environment_beats_the_default_and_yields_to_what_is_typed(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert prepared("").config.logger[0].params["mode"] == "disabled"
    assert prepared("wandb.mode=offline").config.logger[0].params["mode"] == "offline"


def test_consent_is_no_part_of_a_file_and_a_file_of_another_version_is_refused_by_name():
    config = checked({"model._target_": "pkg.Net", "trust": ["pkg"]}, "model=own")
    plain = json.loads(json.dumps(to_plain(config)))
    assert "trust" not in plain
    assert not from_plain(plain).model.typed_target
    assert from_plain({**plain, "trust": ["pkg"]}).trust == ()
    plain["checkpoint"]["kep"] = 3
    with pytest.raises(ConfigError, match=r"checkpoint\.kep: unknown setting\. Did you mean"):
        from_plain(plain)
