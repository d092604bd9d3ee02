"""What is trained on is not what is held out, whatever gives the data."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.lib.config_support import checked
from tests.lib.nightly import slow
from trainer.assemble.data_sets import open_data
from trainer.config.run_config import RunConfig
from trainer.core.errors import ConfigError, DataError
from trainer.core.world import World
from trainer.data.view import DataView

COUNT = 40


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import datasets  # noqa: PLC0415 - seconds, of every process that collects tests

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    datasets.disable_progress_bars()
    return tmp_path


def rows(first: int = 0, count: int = COUNT) -> list[dict[str, list[int]]]:
    return [
        {"input_ids": [i, i + 1, i % 7], "labels": [i, i + 1, i % 7]}
        for i in range(first, first + count)
    ]


def contents(data: DataView) -> list[tuple[int, ...]]:
    return [(*data.read(i, seed=0, epoch=0)["input_ids"].tolist(),) for i in range(len(data))]


def built(target: str, **values: object) -> tuple[DataView, DataView | None, Any]:
    typed = {f"data.{key}": value for key, value in values.items()}
    return parts(checked({"data._target_": target, "command": "plan", **typed}, "data=own"))


def parts(config: RunConfig) -> tuple[DataView, DataView | None, Any]:
    data = open_data(config, World())
    return data.train, data.held_out.get(""), data.split


def write(path: Path) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    return str(path)


FACTORIES: dict[str, dict[str, object]] = {
    "datasets.load_dataset": {"path": "json", "data_files": "tok.jsonl", "split": "train"},
    "datasets.load_dataset ": {"path": "json", "data_files": "tok.jsonl"},
    "datasets.Dataset.from_parquet": {"path_or_paths": "tok.parquet"},
    "datasets.load_from_disk": {"dataset_path": "disk"},
    "datasets.DatasetDict.from_json": {"path_or_paths": {"train": "tok.jsonl"}},
}


@pytest.mark.parametrize("target", ["datasets.load_dataset", *map(slow, [*FACTORIES][1:])])
def test_no_factory_of_datasets_gives_parts_that_overlap(target, folder):
    import datasets  # noqa: PLC0415 - seconds, of every process that collects tests

    write(folder / "tok.jsonl")
    whole = datasets.Dataset.from_list(rows())
    whole.to_parquet("tok.parquet")
    whole.save_to_disk("disk")
    train, held_out, split = built(target.strip(), holdout=0.25, **FACTORIES[target])
    assert held_out is not None
    assert (len(train), len(held_out)) == (30, 10)
    assert len({*contents(train), *contents(held_out)}) == COUNT
    assert split.overlap.found == 0
    assert split.warnings == ()
    kept = split.to_json(train, {"": held_out})
    assert sorted([*kept["held_out"], *train.original_ids(range(30))]) == [*range(COUNT)]
    assert kept["rule"] == "samples drawn by data.split_seed"


@pytest.mark.parametrize("name", ["validation", "test"])
def test_the_parts_of_a_mapping_are_taken_by_their_names(name):
    import datasets  # noqa: PLC0415 - seconds, of every process that collects tests

    named = {"train": rows(), name: rows(100, 9), "other": rows(200, 5)}
    whole = datasets.DatasetDict({k: datasets.Dataset.from_list(v) for k, v in named.items()})
    whole.save_to_disk("parts")
    train, held_out, split = built("datasets.load_from_disk", dataset_path="parts")
    assert held_out is not None
    assert (len(train), len(held_out)) == (COUNT, 9)
    assert split.rule == f"parts train and {name} of the data set"
    del whole["train"]
    whole.save_to_disk("none")
    with pytest.raises(DataError, match=f"gives the parts {name}, other: call one of them train"):
        built("datasets.load_from_disk", dataset_path="none")
    (Path("tok.jsonl")).write_text(json.dumps(rows()[0]) + "\n")
    with pytest.raises(DataError, match="part 'train' is a IterableDataset, which has no length"):
        built("datasets.load_dataset", path="json", data_files="tok.jsonl", streaming=True)


class Forgetful:
    """Takes `split`, and forgets it."""

    def __init__(self, split: str = "train", first: int = 0) -> None:
        self.rows, self.split = rows(), split

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Mapping[str, Tensor]:
        return {name: torch.tensor(value) for name, value in self.rows[i].items()}


class Leaky(Forgetful):
    """Holds out the beginning of what it trains on."""

    def __init__(self, split: str) -> None:
        super().__init__(split)
        if split == "held_out":
            self.rows = rows(count=8)


class Apart(Forgetful):
    """Parts as it should."""

    def __init__(self, split: str) -> None:
        super().__init__(split)
        if split == "held_out":
            self.rows = rows(100)


class Named(Forgetful):
    """Knows other names of its parts, as torchvision's classes do."""

    def __init__(self, split: str) -> None:
        if split not in ("train", "extra"):
            raise ValueError(f"Unknown value {split!r} for argument split.")
        super().__init__(split)


def test_equal_parts_are_one_data_set_and_a_share_of_it_is_held_out():
    train, held_out, split = built(f"{__name__}.Forgetful", holdout=0.1)
    assert held_out is not None
    assert (len(train), len(held_out)) == (36, 4)
    assert not {*contents(train)} & {*contents(held_out)}
    (warning,) = split.warnings
    assert "both parts of" in warning
    assert "the same 40 samples, so data.holdout=0.1 of them is held out" in warning
    train, held_out, _ = built(f"{__name__}.Forgetful", holdout=0)
    assert (len(train), held_out) == (COUNT, None)


def test_parts_that_share_samples_are_named_and_others_are_not():
    train, held_out, split = built(f"{__name__}.Leaky")
    assert held_out is not None
    assert (len(train), len(held_out)) == (COUNT, 8)
    (warning,) = split.warnings
    assert warning.startswith("data: 8 of 8 held-out samples that were compared are trained on too")
    assert split.to_json(train, {"": held_out})["overlap"] == {
        "held_out": 8,
        "training": COUNT,
        "found": 8,
    }
    train, held_out, split = built(f"{__name__}.Apart")
    assert split.warnings == ()
    assert split.holdout is None
    assert split.rule == "parts of the data set itself"
    train, held_out, _ = built(f"{__name__}.Apart", holdout=0)
    assert (len(train), held_out) == (COUNT, None)


def test_a_typed_part_is_the_whole_and_a_name_that_a_class_does_not_know_says_so():
    train, held_out, _ = built(f"{__name__}.Named", split="extra", holdout=0.5)
    assert held_out is not None
    assert (len(train), len(held_out), train.dataset.split) == (20, 20, "extra")
    with pytest.raises(
        ConfigError, match=r"'held_out' for argument split\..*type data\.split=NAME"
    ):
        built(f"{__name__}.Named")


def test_a_share_far_from_the_one_asked_for_is_named():
    Path("books").mkdir()
    for name, size in (("long", 4000), ("short", 2000)):
        Path("books", f"{name}.txt").write_text(f"{name} words " * (size // 10))
    config = checked({"data.path": str(Path("books").absolute()), "command": "plan"}, "data=text")
    train, held_out, split = parts(config)
    assert held_out is not None
    share = held_out.lengths.sum() / (train.lengths.sum() + held_out.lengths.sum())
    (warning,) = split.warnings
    assert warning.startswith(f"data.holdout=0.05: {share:.0%} of the tokens are held out")
    rule = "whole documents, copies of one together, drawn by data.split_seed"
    assert rule in warning
    assert split.rule == rule


def test_what_is_held_out_here_follows_the_split_s_seed_and_not_the_runs():
    found = []
    for run, own in ((0, 0), (5, 0), (5, 3)):
        typed = {"data._target_": f"{__name__}.Forgetful", "seed": run, "data.split_seed": own}
        held_out = parts(checked(typed, "data=own"))[1]
        assert held_out is not None
        found.append(held_out.original_ids(range(len(held_out))).tolist())
    assert found[0] == found[1] != found[2]
