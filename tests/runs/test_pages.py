"""Pages that belong to no run: the recipes, and what an issue needs to know."""

import torch
import yaml

from tests.lib.run_support import shell
from trainer.config.option_files import data_dir


def test_recipes_are_listed_with_what_they_say_and_one_that_is_broken_with_its_fault(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "mine.yaml").write_text("meta: {purpose: try it}\nsteps: 3\n")
    (tmp_path / "odd.yaml").write_text("hydra: {run: {dir: /}}\n")
    monkeypatch.setenv("TRAIN_RECIPES", str(tmp_path))
    assert shell("recipes") == 0
    shown = capsys.readouterr().out
    for path in data_dir("recipes").glob("*.yaml"):
        meta = yaml.safe_load(path.read_text())["meta"]
        about = [f"  {key:<10}{meta[key]}" for key in ("purpose", "cost", "expected", "version")]
        lines = [f"recipe={path.stem}", *about]
        assert "\n".join(lines) in shown
    assert "recipe=mine\n  purpose   try it\n" in shown
    assert "odd.yaml: hydra: not for a recipe" in shown


def test_the_doctor_says_versions_and_limits_and_no_secret(monkeypatch, capsys):
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("HF_TOKEN", "hf_" + "b" * 34)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///x.db")
    assert shell("doctor") == 0
    shown = capsys.readouterr().out
    assert f"  torch         {torch.__version__}\n" in shown
    assert "GiB for tensors (" in shown
    assert "  OMP_NUM_THREADS=1\n" in shown
    assert "  MLFLOW_TRACKING_URI=sqlite:///x.db\n" in shown, "which a tracker's option reads"
    assert "aaaa" not in shown
    assert "bbbb" not in shown
