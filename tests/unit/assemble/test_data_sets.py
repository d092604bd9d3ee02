"""What is trained on is not what is held out, whatever gives the data."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.lib.config_support import checked
from tests.lib.hf_toys import write_lines
from trainer.assemble.data_sets import open_data
from trainer.config.run_config import RunConfig
from trainer.core.errors import ConfigError, DataError
from trainer.core.world import World
from trainer.data.view import DataView

COUNT = 40


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets  # noqa: PLC0415 - seconds, of every process that collects tests

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    datasets.disable_progress_bars()


def rows(first: int = 0, count: int = COUNT) -> list[dict[str, list[int]]]:
    ids = [[i, i + 1, i % 7] for i in range(first, first + count)]
    return [{"input_ids": each, "labels": each} for each in ids]


def contents(data: DataView) -> list[tuple[int, ...]]:
    return [(*data.read(i, seed=0, epoch=0)["input_ids"].tolist(),) for i in range(len(data))]


def built(target: str, **values: object) -> tuple[DataView, DataView | None, Any]:
    typed = {f"data.{key}": value for key, value in values.items()}
    return parts(checked({"data._target_": target, "command": "plan", **typed}, "data=own"))


def parts(config: RunConfig) -> tuple[DataView, DataView | None, Any]:
    data = open_data(config, World())
    return data.train, data.held_out.get(""), data.split


@pytest.mark.parametrize(
    ("target", "values"),
    [
        ("load_dataset", {"path": "json", "data_files": "tok.jsonl", "split": "train"}),
        ("DatasetDict.from_json", {"path_or_paths": {"train": "tok.jsonl"}}),
    ],
)
def test_no_factory_of_datasets_gives_parts_that_overlap(target, values):
    write_lines(Path("tok.jsonl"), rows())
    train, held_out, split = built(f"datasets.{target}", holdout=0.25, **values)
    assert held_out is not None
    assert (len(train), len(held_out)) == (30, 10)
    assert len({*contents(train), *contents(held_out)}) == COUNT
    assert split.overlap.found == 0
    assert split.warnings == ()
    kept = split.to_json(train, {"": held_out})
    assert sorted([*kept["held_out"], *train.original_ids(range(30))]) == [*range(COUNT)]
    assert kept["rule"] == "samples drawn by data.split_seed"


def test_the_parts_of_a_mapping_are_taken_by_their_names():
    import datasets  # noqa: PLC0415 - seconds, of every process that collects tests

    named = {"train": rows(), "test": rows(100, 9), "other": rows(200, 5)}
    whole = datasets.DatasetDict({k: datasets.Dataset.from_list(v) for k, v in named.items()})
    whole.save_to_disk("parts")
    train, held_out, split = built("datasets.load_from_disk", dataset_path="parts")
    assert held_out is not None
    assert (len(train), len(held_out)) == (COUNT, 9)
    assert split.rule == "parts train and test of the data set"
    del whole["train"]
    whole.save_to_disk("none")
    with pytest.raises(DataError, match="gives the parts test, other: call one of them train"):
        built("datasets.load_from_disk", dataset_path="none")
    write_lines(Path("tok.jsonl"), rows(count=1))
    with pytest.raises(DataError, match="part 'train' is a IterableDataset, which has no length"):
        built("datasets.load_dataset", path="json", data_files="tok.jsonl", streaming=True)


class Forgetful:
    """Takes `split`, and forgets it."""

    def __init__(self, split: str = "train") -> None:
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
    found = {"held_out": 8, "training": COUNT, "found": 8}
    assert split.to_json(train, {"": held_out})["overlap"] == found
    _, _, split = built(f"{__name__}.Apart")
    assert split.warnings == ()
    assert split.holdout is None
    assert split.rule == "parts of the data set itself"
    train, held_out, _ = built(f"{__name__}.Apart", holdout=0)
    assert (len(train), held_out) == (COUNT, None)


def test_a_typed_part_is_the_whole_and_a_name_that_a_class_does_not_know_says_so():
    train, held_out, split = built(f"{__name__}.Named", split="extra", holdout=0.5)
    assert held_out is not None
    assert split.warnings == ()
    assert (len(train), len(held_out), train.dataset.split) == (20, 20, "extra")
    fault = r"'held_out' for argument split\..*type data\.split=NAME"
    with pytest.raises(ConfigError, match=fault):
        built(f"{__name__}.Named")


def test_a_share_far_from_the_one_asked_for_is_named():
    Path("books").mkdir()
    for name, size in (("long", 400), ("short", 200)):
        Path("books", f"{name}.txt").write_text(f"{name} words " * size)
    path = str(Path("books").absolute())
    train, held_out, split = parts(checked({"data.path": path, "command": "plan"}, "data=text"))
    assert held_out is not None
    share = held_out.lengths.sum() / (train.lengths.sum() + held_out.lengths.sum())
    (warning,) = split.warnings
    assert split.rule == "whole documents, copies of one together, drawn by data.split_seed"
    assert warning.startswith(
        f"data.holdout=0.05: {share:.0%} of the tokens are held out ({split.rule})"
    )
    Path("books", "short.txt").unlink()
    for share, fault in ((0.05, "nothing is held out, so nothing is evaluated"), (0, "")):
        typed = {"data.path": path, "command": "plan", "data.holdout": share}
        _, held_out, split = parts(checked(typed, "data=text"))
        assert held_out is None
        assert fault in "".join(split.warnings)
        assert bool(split.warnings) == bool(fault)


def test_what_is_held_out_here_follows_the_split_s_seed_and_not_the_runs():
    found = []
    for run, own in ((0, 0), (5, 0), (5, 3)):
        typed = {"data._target_": f"{__name__}.Forgetful", "seed": run, "data.split_seed": own}
        held_out = parts(checked(typed, "data=own"))[1]
        assert held_out is not None
        found.append(held_out.original_ids(range(len(held_out))).tolist())
    assert found[0] == found[1] != found[2]
