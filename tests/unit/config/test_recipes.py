"""Recipes: what is shipped, where they come from, and what they cannot do."""

from __future__ import annotations

import os

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf, open_dict

from trainer.config import recipes
from trainer.config.keys import data_dir
from trainer.config.validate import validate
from trainer.core.errors import ConfigError

CONF = data_dir("conf")
SHIPPED = sorted(data_dir("recipes").glob("*.yaml"))
NEEDS = {"gpt2_124m": ["data.path=tokens.bin"]}


@pytest.fixture(autouse=True)
def no_folders(monkeypatch):
    monkeypatch.delenv(recipes.FOLDERS_VARIABLE, raising=False)


def composed(*overrides: str):
    recipes.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", overrides=list(overrides), return_hydra_config=True)


def plain(full):
    full = full.copy()
    with open_dict(full):
        del full["hydra"]
    return OmegaConf.to_container(full, resolve=True)


def write(folder, text: str, name: str = "friend"):
    path = folder / f"{name}.yaml"
    path.write_text(text)
    return path


def refusals(folder, text: str) -> list[str]:
    path = write(folder, text)
    with pytest.raises(ConfigError) as caught:
        recipes.read(path)
    assert all(fault.startswith(str(path)) and "\n" not in fault for fault in caught.value.faults)
    return [fault.removeprefix(str(path)).removeprefix(": ") for fault in caught.value.faults]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_recipe_composes_and_validates(path):
    full = composed(f"recipe={path.stem}", *NEEDS.get(path.stem, []))
    choices = dict(full.hydra.runtime.choices)
    groups = [
        f"{group}={option}"
        for group, option in choices.items()
        if option is not None and group != "recipe" and not group.startswith("hydra/")
    ]
    config = validate(plain(full), plain(composed(*groups)), (), choices)
    assert config.choices["recipe"] == path.stem


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_recipe_says_purpose_command_cost_and_result(path):
    text = path.read_text()
    assert f"train recipe={path.stem}" in text or f"-m recipe={path.stem}" in text
    assert "# Cost:" in text
    assert "Expected:" in text
    assert set(yaml.safe_load(text)["meta"]) == set(recipes.META)


def test_a_recipe_beats_the_defaults_and_the_command_line_beats_the_recipe():
    assert composed().batch["global"] == 512
    assert composed("recipe=quickstart").batch["global"] == 64
    assert composed("batch.global=7", "recipe=quickstart").batch["global"] == 7


def test_a_recipe_chooses_options_and_the_command_line_chooses_again():
    assert composed("recipe=tokens_batch").batch.unit == "tokens"
    assert composed("recipe=tokens_batch", "batch=samples").batch.unit == "samples"


def test_meta_is_no_setting():
    assert "meta" not in composed("recipe=quickstart")


def test_recipes_stack():
    full = composed("recipe=[quickstart,tokens_batch]")
    assert (full.batch["global"], full.model.width) == (65536, 48)


def test_a_folder_of_recipes_comes_before_the_shipped_ones(tmp_path, monkeypatch):
    write(tmp_path, "seed: 5\n", "quickstart")
    write(tmp_path, "defaults: [tokens_batch]\nseed: 6\n", "mine")
    monkeypatch.setenv(recipes.FOLDERS_VARIABLE, str(tmp_path))
    assert recipes.available() == sorted({*(path.stem for path in SHIPPED), "mine"})
    assert composed("recipe=quickstart").seed == 5
    built_on = composed("recipe=mine")
    assert (built_on.seed, built_on.batch.unit) == (6, "tokens")


def test_a_recipe_is_also_a_path(tmp_path, monkeypatch):
    write(tmp_path, "defaults: [quickstart]\nseed: 9\n")
    monkeypatch.chdir(tmp_path)
    for typed in ("friend.yaml", "./friend", str(tmp_path / "friend.yaml")):
        located = recipes.locate(typed)
        assert located == str(tmp_path / "friend.yaml")
    full = composed(f"recipe={located}")
    assert (full.seed, full.batch["global"]) == (9, 64)


def test_a_name_is_no_path_and_a_path_has_to_lead_somewhere(tmp_path):
    assert recipes.locate("quickstart") == "quickstart"
    with pytest.raises(ConfigError, match="no such file"):
        recipes.locate(str(tmp_path / "none.yaml"))
    with pytest.raises(ConfigError, match=r"ends in \.yaml"):
        recipes.locate("friend.yml")


def test_hydra_lists_recipes_as_a_group():
    source = recipes.RecipeSource("trainer", f"{recipes.SCHEME}://{SHIPPED[0].parent}")
    assert source.available()
    assert source.list("", None) == ["recipe"]
    assert source.list("recipe", None) == [path.stem for path in SHIPPED]
    assert source.list("model", None) == []
    assert not source.is_config("quickstart")
    assert not source.is_group("hydra")


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("hydra: {callbacks: {x: {_target_: os.system}}}", "hydra"),
        ("hydra: {run: {dir: /tmp/x}}", "hydra"),
        ("trust: [evil]", "trust"),
        ("command: export", "command"),
        ("resume: /some/run", "resume"),
        ("init: /some/run", "init"),
        ("outputs: /etc", "outputs"),
        ("export: {to: /etc}", "export"),
        ("wandb: {mode: online}", "wandb.mode"),
        ("wandb: {entity: theirs}", "wandb.entity"),
        ("wandb: {mode: '${name}'}", "wandb.mode"),
        ("_target_: trainer.x.Y", "_target_"),
        ("_partial_: true", "_partial_"),
        ("model: {_args_: [1]}", "model._args_"),
        ("model: {inner: {_recursive_: false}}", "model.inner._recursive_"),
        ("model: {_target_: [a]}", "model._target_"),
        ("model: {kwargs: {trust_remote_code: true}}", "model.kwargs.trust_remote_code"),
        ("data: {path: '${oc.env:HOME}'}", "data.path"),
        ("data: {path: '${oc.decode:${name}}'}", "data.path"),
        ("data: {path: 'a${oc.env:${name}}b'}", "data.path"),
        ("wandb: {tags: ['${oc.env:WANDB_API_KEY}']}", "wandb.tags"),
        ("model: {'${oc.env:X}': 1}", "model.${oc.env"),
        ("defaults: [hydra/launcher: x]", "defaults"),
        ("defaults: [override /hydra/job_logging: none]", "defaults"),
        ("defaults: [override hydra/launcher: x]", "defaults"),
        ("defaults: [/hydra/launcher/x]", "defaults"),
        ("defaults: [override /model: ../../x]", "defaults"),
        ("defaults: [override /model: /etc/x]", "defaults"),
        ("defaults: [override /model: 'pkg://x']", "defaults"),
        ("defaults: [override /model@hydra.run: x]", "defaults"),
        ("defaults: ['file:///etc/x']", "defaults"),
        ("defaults: [override /model: '${name}']", "defaults"),
        ("defaults: [../x]", "defaults"),
        ("defaults: x", "defaults"),
        ("meta: {secret: x}", "meta"),
        ("meta: x", "meta"),
        ("- a\n- b", "a recipe is a mapping"),
        ("a: &x [1]\nb: *x", "`*alias`"),
        ("seed: 1\n# " + "x" * 70_000, "more than 64 KiB"),
    ],
)
def test_a_recipe_that_could_do_more_than_set_values_is_refused(tmp_path, text, key):
    assert refusals(tmp_path, text)[0].startswith(key)


def test_all_that_is_wrong_with_a_recipe_comes_at_once(tmp_path):
    assert len(refusals(tmp_path, "hydra: {}\ntrust: [a]\nmodel: {_args_: []}")) == 3


def test_a_key_that_is_given_twice_names_its_line(tmp_path):
    (fault,) = refusals(tmp_path, "seed: 1\nsteps: 2\nseed: 3\n")
    assert fault == ":3: found duplicate key seed"


def test_a_yaml_tag_is_refused_in_one_line(tmp_path):
    (fault,) = refusals(tmp_path, "seed: !!python/object/apply:os.system ['true']\n")
    assert fault.startswith(":1: could not determine a constructor for the tag")


def test_broken_yaml_and_foreign_bytes_are_refused_in_one_line(tmp_path):
    assert refusals(tmp_path, "a: [1\n")[0].startswith(":2: ")
    path = tmp_path / "friend.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        recipes.read(path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# @package _global_\nseed: 1",
        "defaults: [quickstart, override /model: gpt_small, override /accum/gradient: sum, _self_]",
        "defaults: [{override /recipe: null}]",
        "model: {_target_: trainer.models.gpt.GPT, width: 8}",
        "data: {max_length: '${model.max_length}'}",
        "wandb: {project: mine, tags: [a]}",
        "meta: {purpose: x, cost: 3, expected: y}\noptimizer: {groups: {'*.bias': {lr: 1}}}",
    ],
)
def test_a_recipe_of_values_and_options_passes(tmp_path, text):
    assert "meta" not in recipes.read(write(tmp_path, text))


def test_a_hostile_recipe_stops_the_composition_before_hydra_reads_it(tmp_path):
    path = write(tmp_path, "hydra: {job: {env_set: {TRAIN_TEST_LEAK: '1'}}}")
    with pytest.raises(ConfigError, match="hydra: not for a recipe"):
        composed(f"recipe={path}")
    assert "TRAIN_TEST_LEAK" not in os.environ


def test_registering_twice_changes_nothing():
    recipes.register()
    recipes.register()
    assert composed("recipe=quickstart", "name=mine").hydra.run.dir.endswith("-mine")
    assert composed("recipe=quickstart").hydra.run.dir.endswith("-train")


def test_a_damaged_installation_says_what_is_missing():
    with pytest.raises(FileNotFoundError, match="nothing"):
        data_dir("nothing")
