"""What `train evaluate` writes of each sample, where it is asked for."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.lib.run_support import TOYS, entries, go, read_json, shell, state
from tests.lib.run_toys import DoubleNet, Images, Rows, Vision
from trainer.cli.python_api import FinishedRun

KINDS = ("plain", "striped", "dotted", "other")


class Kinds(Images):
    """Pictures whose classes have names; one has no label."""

    label_names = KINDS

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return {**super().__getitem__(index), "labels": -100 if index == 20 else index % 4}


def predictions(run: FinishedRun) -> list[dict[str, Any]]:
    assert shell(f"evaluate run={run.folder} trust=[tests] eval.predictions=true") == 0
    return entries(run, "predictions.jsonl")


def trained(run: FinishedRun, module: torch.nn.Module) -> torch.nn.Module:
    weights = {n.removeprefix("model."): t for n, t in state(run).items() if n[:6] == "model."}
    module.load_state_dict(weights)
    return module.eval()


def test_a_classifier_names_the_class_of_every_sample(capsys):
    data = f"data._target_={__name__}.Kinds data.holdout=0.7"
    run = go(f"model._target_={TOYS}.Vision {data} objective=classify steps=2")
    found, model, data = predictions(run), trained(run, Vision()), Kinds()
    held_out = read_json(run.folder / "splits.json")["held_out"]
    assert [line["id"] for line in found] == sorted(held_out)
    shown = " ".join(capsys.readouterr().out.split())
    assert f"{len(held_out)} predictions written to outputs/" in shown
    for line in found:
        sample = data[line["id"]]
        with torch.no_grad():
            logits = model(sample["pixels"][None])[0]
        assert line["prediction"] == KINDS[int(logits.argmax())]
        if line["id"] == 20:
            assert (line["label"], line["loss"], line["terms"]) == (-100, None, 0)
        else:
            assert (line["label"], line["terms"]) == (KINDS[sample["labels"]], 1)
            expected = float(F.cross_entropy(logits, torch.tensor(sample["labels"])))
            assert line["loss"] == pytest.approx(expected, rel=1e-12)
    losses = [line["loss"] for line in found if line["terms"]]
    record = read_json(run.folder / "evaluate.json")
    assert sum(losses) / len(losses) == pytest.approx(record["eval_loss"], rel=1e-12)
    for line in record["worst"]:
        assert (run.folder / line["picture"]).read_bytes().startswith(b"\x89PNG")
    page = (run.folder / "report.html").read_text()
    assert page.count("data:image/png;base64,") == len(record["worst"])
    assert f"{len(losses)} samples, " in page, "by class"


@pytest.mark.parametrize("objective", ["token_classify", "next_token"])
def test_tokens_have_their_tags_and_language_models_a_loss_alone(objective):
    run = go(
        f"model._target_={TOYS}.DoubleNet data._target_={TOYS}.Rows data.holdout=0.4 "
        f"objective={objective} steps=2 eval.sets.more._target_={TOYS}.Rows eval.sets.more.size=9"
    )
    found, model, data = predictions(run), trained(run, DoubleNet()), Rows()
    for line in found:
        sample = data[line["id"]]
        with torch.no_grad():
            logits: Tensor = model(sample["input_ids"][None])[0]
        labels = sample["labels"]
        if objective == "next_token":
            logits, labels = logits[:-1], labels[1:]
            assert (line["label"], line["prediction"]) == (None, None)
        else:
            assert line["prediction"] == logits.argmax(-1)[labels >= 0].tolist()
            assert line["label"] == labels[labels >= 0].tolist()
        assert line["terms"] == int((labels >= 0).sum())
        if line["terms"]:
            expected = float(F.cross_entropy(logits, labels))
            assert line["loss"] == pytest.approx(expected, rel=1e-12)
    assert [line["id"] for line in entries(run, "predictions-more.jsonl")] == [*range(9)]
