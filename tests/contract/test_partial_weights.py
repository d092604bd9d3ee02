"""A run begins with what of other weights fits it by name and shape, and lists all of it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.lib.hf_toys import TEXTS, save_job_files, write_lines
from tests.lib.nightly import slow
from tests.lib.run_support import go, on, overrides, read_json, state
from trainer import train
from trainer.checkpoint.partial_weights import fitting, taken_rows
from trainer.checkpoint.weights import StoredWeights, open_weights
from trainer.core.errors import ConfigError, NoCheckpointError


class Tied(nn.Module):
    def __init__(self, classes: int = 3, width: int = 4) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(6, width), nn.Linear(width, 6, bias=False)
        self.out.weight = self.embed.weight
        self.norm, self.head = nn.BatchNorm1d(width), nn.Linear(width, classes)


def stored(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> StoredWeights:
    save_file(tensors, tmp_path / "w.safetensors")
    return open_weights(tmp_path / "w.safetensors")


def test_what_fits_is_taken_and_the_rest_is_listed_with_both_shapes(tmp_path):
    first = Tied(classes=5)
    tensors = {f"body.{name}": value.clone() for name, value in first.state_dict().items()}
    tensors |= {"body.more.weight": torch.ones(2), "body.out.weight": torch.ones(6, 4)}
    del tensors["body.norm.bias"]
    model = Tied()
    drawn = model.head.weight.clone()
    found = fitting(stored(tmp_path, tensors), model)
    found.fill(model)
    (row,) = taken_rows(model)
    assert row.values["init_new"] == {
        "norm.bias": "not there",
        "head.weight": "[5, 4] there, [3, 4] here",
        "head.bias": "[5] there, [3] here",
    }
    # Two tensors there are one here: the first gives it, and the other is left over.
    assert model.out.weight.equal(first.embed.weight)
    assert row.values["init_left_over"] == ["more.weight", "out.weight"]
    assert model.head.weight.equal(drawn)
    assert row.text.startswith("6 of 9 tensors, 3 new (norm, head), 2 left over (more, out), head.")


def test_weights_of_which_nothing_fits_are_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"none of its tensors .*: embed.weight \(\[6, 4\] there"):
        fitting(stored(tmp_path, {"embed.weight": torch.ones(6, 4)}), Tied(width=8))


SMALL = "model=gpt_tiny model.vocab_size=16 model.max_length=16 model.width=24"
LAYOUTS = ["", slow("parallel=fsdp parallel.ranks=2")]


@pytest.mark.parametrize("layout", LAYOUTS, ids=["one", "fsdp"])
@pytest.mark.usefixtures("own_folder")
def test_a_run_lists_what_it_took_as_its_plan_does_and_goes_on(layout):
    base = go(f"{SMALL} steps=2")
    line = f"{SMALL} model.num_layers=3 steps=1 optimizer.lr=0 {layout} init={base.folder}"
    with pytest.raises(NoCheckpointError, match=r"; init.partial=true takes what fits, and leaves"):
        go(line)
    run = go(f"{line} init.partial=true")
    plan = read_json(run.folder / "plan.json")
    assert {name[:8] for name in plan["init_new"]} == {"blocks.2"}
    for name in plan["init_taken"]:
        assert state(run)[f"model.{name}"].equal(state(base)[f"model.{name}"])
    planned = train(["plan", *overrides(f"{line} init.partial=true")])
    assert planned.result["init_new"] == plan["init_new"]
    assert on(run, "steps=2").result["step"] == 2


@pytest.mark.slow
@pytest.mark.usefixtures("own_folder")
def test_an_adapter_of_other_classes_is_taken_without_its_head():
    save_job_files("bert")
    line = "model=hf model.path=bert model.task=sequence_classification data=hf batch.global=8 "
    line += "steps=1 accum=fixed accum.micro=8 adapter=lora logger=[] eval.every=null device=cpu"
    records = [{"text": text, "label": "abcde"[i % 5]} for i, text in enumerate(TEXTS)]
    write_lines(Path("five.jsonl"), records)
    base = train([*line.split(), "data.path=reviews.csv"])
    line += f" data.path=five.jsonl init={base.folder} init.partial=true"
    run = train(line.split())
    plan = read_json(run.folder / "plan.json")
    assert {name.partition(".")[0] for name in plan["init_new"]} == {"classifier"}
    assert any("lora_A" in name for name in plan["init_taken"])
    assert train([f"resume={run.folder}", "steps=2"]).result["step"] == 2
