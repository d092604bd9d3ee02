"""Recipes: what is shipped, where they come from, and what they cannot do."""

import pytest
import yaml

from tests.lib.cli_support import prepared
from tests.lib.config_support import composed, options
from tests.lib.nightly import slow
from trainer import __version__
from trainer.config import consent, recipes
from trainer.config.option_files import data_dir
from trainer.config.validate import validate
from trainer.core.errors import ConfigError

SHIPPED = sorted(data_dir("recipes").glob("*.yaml"))
NEEDS = {
    "cifar10_resnet": ["data.path=cifar10"],
    "chat_lora": ["model.path=base", "data.path=chat.jsonl"],
    "dpo": ["model.path=base", "data.path=pairs.jsonl"],
    "glue": ["model.path=base", "data.path=pairs.csv"],
    "gpt2_124m": ["data.path=tokens.bin"],
    "mrpc": ["model.path=base", "data.path=pairs.csv"],
    "reward": ["model.path=base", "data.path=pairs.jsonl"],
    "squad_lora": ["model.path=base", "data.path=squad.jsonl"],
    "sts": ["model.path=base", "data.path=scores.jsonl"],
    "trl_sft": ["model.path=base", "data.path=chat.jsonl"],
}


@pytest.fixture(autouse=True)
def no_folders(monkeypatch):
    monkeypatch.delenv(recipes.FOLDERS_VARIABLE, raising=False)


def write(folder, text: str, name: str = "friend"):
    path = folder / f"{name}.yaml"
    path.write_bytes(text.encode("latin-1"))
    return path


SHOWN = {"chat_lora", "cifar10_resnet", "gpt2_124m", "quickstart", "squad_lora", "tokens_batch"}
NAMES = [path.stem for path in SHIPPED]


@pytest.mark.parametrize("name", [each if each in SHOWN else slow(each) for each in NAMES])
def test_every_shipped_recipe_composes_and_validates(name):
    raw, choices = options(f"recipe={name}", *NEEDS.get(name, []))
    picked = {g: o for g, o in choices.items() if o and not g.startswith(("hydra/", "recipe"))}
    config = validate(raw, options(*(f"{g}={o}" for g, o in picked.items()))[0], (), choices)
    assert config.choices["recipe"] == name


def test_every_shipped_recipe_says_its_command_and_version():
    assert len(SHIPPED) >= 15
    for path in SHIPPED:
        text = path.read_text()
        assert f"train recipe={path.stem}" in text or f"-m recipe={path.stem}" in text
        assert yaml.safe_load(text)["meta"]["version"] <= __version__


def test_a_recipe_beats_the_defaults_later_ones_beat_it_and_the_command_line_beats_all():
    stacked = composed("recipe=[quickstart,tokens_batch]", "seed=7")
    assert "meta" not in stacked
    assert (stacked.batch["global"], stacked.model.width) == (65536, 48)
    assert (stacked.batch.unit, stacked.seed) == ("tokens", 7)
    typed = composed("batch=samples", "batch.global=7", "recipe=tokens_batch", "name=mine")
    assert (typed.batch.unit, typed.batch["global"]) == ("samples", 7)
    assert typed.hydra.run.dir.endswith("-mine")
    assert stacked.hydra.run.dir.endswith("-train")
    for line, length in (("steps=3", (3, None)), ("epochs=2", (None, 2)), ("", (None, 6))):
        config = prepared(f"recipe=masked_lm {line}").config
        assert (config.steps, config.epochs) == length


def test_a_folder_of_recipes_comes_before_the_shipped_ones(tmp_path, monkeypatch):
    write(tmp_path, "seed: 5\n", "quickstart")
    write(tmp_path, "defaults: [tokens_batch]\nseed: 6\n", "mine")
    monkeypatch.setenv(recipes.FOLDERS_VARIABLE, str(tmp_path))
    both = composed("recipe=[mine,quickstart]")
    assert (both.seed, both.batch.unit) == (5, "tokens")


def test_a_recipe_extends_another_and_a_base_that_is_missing_or_itself_is_one_line(
    tmp_path, monkeypatch
):
    monkeypatch.setenv(recipes.FOLDERS_VARIABLE, str(tmp_path))
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "defaults: [digits, override /batch: tokens]\nsteps: 8\naccum: fixed\n", "mid")
    write(tmp_path, "defaults: [mid]\nsteps: 9\naccum: budget\n", "last")
    full = composed("recipe=last")
    assert (full.steps, full.batch.unit, full.model.width) == (9, "tokens", 16)
    assert full.hydra.runtime.choices["accum"] == "budget"
    write(tmp_path, "defaults: [friend2]\n", "friend3")
    write(tmp_path, "defaults: [friend3]\n", "friend2")
    write(tmp_path, "defaults: [digit]\n", "none")
    for typed, answer in {
        "./friend2": r"^recipe=.*friend2.*: extends itself, by its defaults$",
        "./none": r"^In 'recipe/.*none.*': recipe=digit: no such option\. Did you mean digits\?",
    }.items():
        with pytest.raises(ConfigError, match=answer):
            prepared(f"recipe={typed}")


def test_a_recipe_of_a_newer_version_warns_and_one_of_another_says_so_where_a_key_is_unknown(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAIN_RECIPES", str(tmp_path))
    for version in ("0.0.9", __version__, "0.10"):  # YAML has 0.10 as a number
        path = write(tmp_path, f"meta: {{version: {version}}}\nsteps: 3\n", version)
        said = f"recipe={path}: written for version {version}, this is {__version__}"
        job = prepared(f"recipe={path}")
        assert job.note == (f"warning: {said}\n" if version == "0.10" else "")
        write(tmp_path, f"meta: {{version: {version}}}\nsteps: 3\n", "base")
        write(tmp_path, f"meta: {{version: {__version__}}}\ndefaults: [base]\n", "upper")
        assert prepared("recipe=./upper").note == job.note.replace(str(path), "base")
        write(tmp_path, f"meta: {{version: {version}}}\nstpes: 3\n", version)
        with pytest.raises(ConfigError, match=r"stpes: unknown setting\. Did") as why:
            prepared(f"recipe={path}")
        assert (said in str(why.value)) == (version != __version__)


HOSTILE = {
    "data: {path: '${oc.env:HOME}'}": "${oc.env:HOME}",
    "data: {path: '${oc.decode:${name}}'}": "${oc.decode",
    "data: {path: 'a${oc.env:${name}}b'}": "${oc.env",
    'data: {path: "\\x24{oc.env:HOME}"}': "${oc.env:HOME}",
    "model: {'${oc.env:X}': 1}": "${oc.env",
    "defaults: [override /hydra/job_logging: none]": "defaults: override /hydra",
    "defaults: [override hydra/launcher: x]": "defaults: override hydra",
    "defaults: [/hydra/launcher/x]": "defaults: /hydra",
    "defaults: [override /model: 'pkg://x']": "defaults: pkg://x",
    "defaults: [override /model@hydra.run: x]": "defaults: override /model@",
    "defaults: ['file:///etc/x']": "defaults: file:",
    "defaults: [override /model: '${name}']": "defaults: ${name}",
    "defaults: [../x]": "defaults: ../x",
    "defaults: x": "defaults: ",
    "- a\n- b": "a recipe must be `key: value` YAML",
    "a: &x [1]\nb: *x": "a recipe must be `key: value` YAML of at most 64 KiB, without *alias",
    "seed: 1\n# " + "x" * 70_000: "a recipe must be `key: value` YAML of at most 64 KiB",
    "seed: 1\nsteps: 2\nseed: 3\n": "line 3: found duplicate key seed",
    "seed: !!python/object/apply:os.system ['true']\n": "line 1: could not determine a constructor",
    "\xff\xfe": "'utf-8' codec can't decode",
}


HARMLESS = [
    "defaults: [quickstart, {override /recipe: null}, override /accum/gradient: sum, _self_]",
    "meta: {purpose: x, cost: 3, expected: y}\ndata: {max_length: '${model.max_length}'}",
]


def test_a_recipe_that_could_do_more_than_set_values_is_refused(tmp_path):
    for text in HARMLESS:
        assert "meta" not in recipes.read_recipe(write(tmp_path, text))
    for text, answer in HOSTILE.items():
        with pytest.raises(ConfigError) as caught:
            recipes.read_recipe(path := write(tmp_path, text))
        (fault,) = caught.value.faults
        assert fault.startswith(f"{path}: {answer}")
        assert "\n" not in fault
    several = "hydra: {}\ndefaults: [../x]\nname: '${oc.env:X}'"
    with pytest.raises(ConfigError) as caught:
        recipes.read_recipe(write(tmp_path, several))
    assert len(caught.value.faults) == 3


ASKED = {
    **{"trust": ["evil"], "command": "export", "resume": "/some/run", "init": "/some/run"},
    **{"outputs": "/etc", "export.to": "/etc", "wandb.mode": "online", "wandb.entity": "theirs"},
    **{"tensorboard.folder": "/any/where", "mlflow.tracking_uri": "sqlite:////any/where.db"},
    **{"model.kwargs.trust_remote_code": True, "model.attn_implementation": "evil/evil"},
}


def test_what_only_its_user_may_set_is_asked_of_them():
    base, _ = options()
    for key, value in ASKED.items():
        tree = {**base, key: value}
        (fault,) = consent.key_faults(tree, base, ())
        assert fault.startswith(f"{key}=")
        assert "type it yourself" in fault
        assert list(consent.key_faults(tree, base, {key})) == []
    local = {**base, "wandb.mode": "disabled", "model.attn_implementation": "sdpa"}
    assert list(consent.key_faults(local, base, ())) == []
