"""Configs: what a value is read as."""

import copy
import json

import pytest

from tests.lib.cli_support import prepared
from tests.lib.config_support import checked, options
from trainer.config.amounts import parse_bytes
from trainer.config.messages import lookup
from trainer.config.run_config import to_plain
from trainer.config.validate import from_plain, validate
from trainer.core.errors import ConfigError


@pytest.fixture(autouse=True)
def quiet_environment(monkeypatch):
    for name in ("WANDB_MODE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


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
    for key, (_, read) in READ.items():
        found = lookup(plain, key)
        assert found == read
        assert type(found) is type(read)


def test_sizes_of_memory_are_read_and_all_else_stays_what_it_is():
    sizes = {"1B": 1, "2 KB": 2000, "1.5MiB": 3 * 2**19, "80GiB": 80 * 2**30, "1TB": 10**12}
    sizes |= {text: text for text in ("80", "80G", "GiB", "-1GiB", "1iB", "1 024KB")}
    assert {text: parse_bytes(text) for text in sizes} == sizes


def test_of_three_sizes_the_one_that_was_not_typed_gives_way():
    config = checked({"accum.micro": 4, "accum.steps": 3}, "accum=fixed")
    assert config.batch.global_batch is None
    filled = config.with_global_batch(world_size=2)
    assert filled.batch.global_batch == 24
    assert filled.with_global_batch(world_size=4).batch.global_batch == 24
    config = checked({"batch.global": 100, "accum.micro": 8}, "accum=fixed")
    assert config.with_global_batch(1).batch.global_batch == 100
    assert config.accum.params == {"micro": 8, "steps": None}


def test_a_resumed_run_keeps_its_global_batch_when_only_steps_are_typed():
    run, picked = copy.deepcopy(options("accum=fixed"))
    run["batch"]["global"], run["accum"]["micro"] = 96, 8
    typed = copy.deepcopy(run)
    typed["accum"]["steps"] = 3
    config = validate(typed, run, (), picked, {"accum.steps"})
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
    for key in ("network", "batchnorm"):  # a setting, and a group
        with pytest.raises(ConfigError, match=f"^{key}: is missing$"):
            from_plain({name: value for name, value in plain.items() if name != key})
    plain["checkpoint"]["kep"] = 3
    with pytest.raises(ConfigError, match=r"checkpoint\.kep: unknown setting\. Did you mean"):
        from_plain(plain)
