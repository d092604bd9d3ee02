"""What a resumed run may change, and what it may not."""

import json

import pytest

from tests.lib.config_support import checked
from trainer.config.run_config import config_hash, contract, contract_diff, reading_faults
from trainer.core.coupling import NONE, Coupling

MICRO = Coupling("micro_batch")
EXECUTION = {
    **{"accum.micro": 4, "activation_checkpointing": True, "checkpoint.every": 7, "compile": True},
    **{"device": "cpu", "log.samples": True, "name": "b", "num_workers": 3},
    "parallel.timeout_s": 9.0,
}
STEP = {
    **{"batch.global": 64, "batch.tail": "drop", "clip_norm": None, "data.max_length": 128},
    **{"model.width": 48, "objective.z_loss": 0.1, "optimizer.lr": 0.1, "precision": "bf16"},
    **{"scheduler.warmup": 2, "seed": 1, "data.split_seed": 1},
}


def changed(old, new):
    return [line.split("=")[0] for line in contract_diff(old, new)]


def test_what_changes_the_step_is_refused_by_name_unless_it_is_allowed():
    begun = {"precision": "fp32"}
    old = contract(checked(begun))
    assert contract(checked(begun | EXECUTION), ranks=2) == old
    for key, value in STEP.items():
        new = contract(checked(begun | {key: value}))
        assert changed(old, new) == [key]
        assert contract_diff(old, new, [key]) == contract_diff(old, new, [key.split(".")[0]]) == []


@pytest.mark.parametrize(
    ("values", "coupling", "mode"),
    [
        ({"batch.normalizer": "micro_batches"}, NONE, "auto"),
        ({}, NONE, "micro"),
        ({}, MICRO, "auto"),
    ],
)
def test_the_cut_is_part_of_the_contract_where_the_step_depends_on_it(values, coupling, mode):
    options = ("accum=fixed", f"batchnorm={mode}")
    two, four = (checked({**values, "accum.micro": count}, *options) for count in (2, 4))
    terms = contract(two, coupling=coupling, ranks=1)
    assert changed(terms, contract(four, coupling=coupling, ranks=1)) == ["accum.micro"]
    assert changed(terms, contract(two, coupling=coupling, ranks=2)) == ["parallel.ranks"]


def test_an_objective_by_the_model_is_open_likewise_to_a_command_that_reads_a_run():
    became = contract(checked({"objective._target_": "mine.Loss"}, "objective=own"))
    for config in (checked(), checked({"command": "evaluate", "run": "r"})):
        assert contract_diff(became, contract(config)) == []
        assert reading_faults(config, became) == []
    (fault,) = reading_faults(checked({"model.width": 48}), became)
    assert fault.startswith("model.width=48: the run has")
    other = {"command": "evaluate", "run": "r", "data.holdout": "all", "tokenizer.path": "other"}
    (fault,) = reading_faults(checked(other), became)
    assert fault.startswith("tokenizer.path=other: the run has null; leave it out; the same")


def test_a_contract_survives_json_and_its_hash_knows_it():
    cases = ({"optimizer.betas": [0.8, 0.9]}, {"optimizer.betas": [0.8, 0.9], "device": "cpu"}, {})
    one, same, other = (contract(checked(values)) for values in cases)
    assert json.loads(json.dumps(one)) == one
    assert config_hash(one) == config_hash(json.loads(json.dumps(same))) != config_hash(other)
