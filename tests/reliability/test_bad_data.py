"""Harnesses 21 and 22: data that are damaged, and data that are not the ones the run began with.

Each damage ends with exit 3 and one line that names file and record; `data.on_bad=skip` passes
over what is bad in a corpus, counts it, lists it, and stops where it is too much. Data that
changed under a run are told by their fingerprint, whatever was changed; a changed contract is
refused with a line for each key.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.reliability import lab, toys
from trainer.cli import main as cli
from trainer.config.run_config import RunConfig
from trainer.core.errors import DataError
from trainer.data.text import Text

TEXT = (
    "data=text",
    "data.max_length=24",
    "model._target_=tests.reliability.toys.Net",
    "model.vocabulary=258",
    "steps=2",
    "batch.global=4",
    "eval.every=null",
)
TOKENS = (*TEXT, "data=tokens", "model.vocabulary=65536", "data.max_length=8")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAIN_CACHE", str(tmp_path / "cache"))


def settings_of(path: Path, *more: str) -> RunConfig:
    keys = {line.partition("=")[0] for line in more}
    base = [line for line in TEXT if line.partition("=")[0] not in keys]
    return lab.config.__wrapped__(*base, *more, f"data.path={path}")  # type: ignore[no-any-return]


def good_lines(count: int = 60) -> list[bytes]:
    return [
        json.dumps({"text": f"document number {i} of the corpus"}).encode() for i in range(count)
    ]


def with_line(line: bytes) -> Callable[[Path], Path]:
    """A corpus of JSON lines whose line 8 is given."""

    def write(folder: Path) -> Path:
        path = folder / "corpus.jsonl"
        lines = good_lines()
        lines[7] = line
        path.write_bytes(b"\n".join(lines) + b"\n")
        return path

    return write


BAD_LINES = {
    "not JSON": b"document",
    "not UTF-8": b'{"text": "d\xff\xfe"}',
    "an empty text": b'{"text": ""}',
}
"""One of each kind; `tests/unit/data/test_text.py` has them all."""


def assert_one_line(ended: lab.Ended, *named: str) -> None:
    assert ended.code == 3, ended
    assert "\n" not in ended.error
    for name in named:
        assert name in ended.error, ended.error


@pytest.mark.parametrize("damage", BAD_LINES)
def test_a_bad_record_is_named_by_file_and_line(damage: str, tmp_path: Path) -> None:
    path = with_line(BAD_LINES[damage])(tmp_path)
    assert_one_line(lab.run(settings_of(path), tmp_path / "run"), f"{path}:8")


@pytest.mark.parametrize("damage", BAD_LINES)
def test_a_bad_record_is_passed_over_counted_and_listed(damage: str, tmp_path: Path) -> None:
    path = with_line(BAD_LINES[damage])(tmp_path)
    ended = lab.run(settings_of(path, "data.on_bad=skip"), tmp_path / "run")
    assert ended.code == 0, ended
    assert "1 bad record is passed over" in " ".join(ended.screen.split())
    assert f"{path}:8" in "".join(ended.screen.split())
    first, *others = lab.logged(tmp_path / "run")["ledger"]
    assert (first["step"], first["ids"], first["bad_records"]) == (0, [], 1)
    assert first["records"][0].startswith(f"{path}:8: ")
    assert [entry["step"] for entry in others] == [1, 2]


def test_too_many_bad_records_are_not_passed_over(tmp_path: Path) -> None:
    path = with_line(b"bad\nworse")(tmp_path)
    ended = lab.run(settings_of(path, "data.on_bad=skip"), tmp_path / "run")
    assert_one_line(ended, "2 of 61 records are bad", f"{path}:8")


def empty_file(folder: Path) -> Path:
    (folder / "empty.txt").touch()
    return folder / "empty.txt"


def blank_file(folder: Path) -> Path:
    (folder / "blank.txt").write_text("\n \n\t\n")
    return folder / "blank.txt"


def empty_folder(folder: Path) -> Path:
    (folder / "texts").mkdir()
    return folder / "texts"


def folder_with_an_empty_file(folder: Path) -> Path:
    (folder / "texts").mkdir()
    (folder / "texts" / "a.txt").write_text("a document")
    (folder / "texts" / "hollow.txt").touch()
    return folder / "texts"


def folder_with_a_binary_file(folder: Path) -> Path:
    (folder / "texts").mkdir()
    (folder / "texts" / "a.txt").write_text("a document")
    (folder / "texts" / "hollow.bin").write_bytes(bytes(range(256)))
    return folder / "texts"


def too_few(folder: Path) -> Path:
    (folder / "few.txt").write_text("one\n\ntwo\n")
    return folder / "few.txt"


def folder_with_a_pipe(folder: Path) -> Path:
    os.mkfifo(corpus(folder) / "hollow.pipe")
    return folder / "texts"


def folder_with_a_socket(folder: Path) -> Path:
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(os.path.relpath(corpus(folder) / "hollow.sock"))
    return folder / "texts"


def folder_with_a_link_to_nothing(folder: Path) -> Path:
    (corpus(folder) / "hollow.txt").symlink_to("nowhere")
    return folder / "texts"


def folder_with_a_link_to_a_folder(folder: Path) -> Path:
    (corpus(folder) / "more").symlink_to(folder)
    return folder / "texts"


def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "hollow.txt")
    return folder / "hollow.txt"


PLACES: Mapping[Callable[[Path], Path], str] = {
    empty_file: "empty.txt",
    blank_file: "blank.txt",
    empty_folder: "texts",
    folder_with_an_empty_file: "hollow.txt",
    folder_with_a_binary_file: "hollow.bin",
    folder_with_a_pipe: "hollow.pipe: neither a file nor a folder",
    folder_with_a_socket: "hollow.sock: neither a file nor a folder",
    folder_with_a_link_to_nothing: "hollow.txt: neither a file nor a folder",
    folder_with_a_link_to_a_folder: "more: a link to a folder",
    pipe: "hollow.txt: neither a file nor a folder",
}


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_a_place_without_usable_data_is_named(
    place: Callable[[Path], Path], tmp_path: Path
) -> None:
    with pytest.raises(DataError) as caught:
        Text(str(place(tmp_path)), max_length=24)
    assert_one_line(lab.Ended(caught.value.exit_code, str(caught.value)), PLACES[place])


def test_a_path_that_leads_nowhere_is_named_before_there_is_a_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.jsonl"):
        settings_of(tmp_path / "nowhere.jsonl")


def test_data_that_do_not_fill_a_step_are_refused(tmp_path: Path) -> None:
    settings = settings_of(too_few(tmp_path), "batch.tail=drop", "batch.global=50")
    ended = lab.run(settings, tmp_path / "run")
    assert_one_line(ended, "50")


@pytest.mark.parametrize("damage", ["odd size", "no tokens", "beyond the vocabulary", "a header"])
def test_a_damaged_token_file_is_named(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    tokens = np.arange(400, dtype="<u2")
    if damage == "beyond the vocabulary":
        tokens[250] = 60_000
    whole = tokens.tobytes()
    np.save(tmp_path / "tokens.npy", tokens)
    wrong = {
        "odd size": whole[:-1],
        "no tokens": b"",
        "a header": (tmp_path / "tokens.npy").read_bytes(),
    }
    path.write_bytes(wrong.get(damage, whole))
    more = [line for line in TOKENS if line not in TEXT]
    limited = ["data.vocab_size=50000"] if damage == "beyond the vocabulary" else []
    settings = settings_of(path, *more, *limited, "steps=11")
    assert_one_line(lab.run(settings, tmp_path / "run"), "tokens.bin")


class Broken(toys.Rows):
    """Rows of a user, one of which is wrong in the way `kind` says."""

    def __init__(self, kind: str = "raises", **more: Any) -> None:
        super().__init__(**more)
        self.kind = kind

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        return WRONG[self.kind](dict(sample)) if index == 11 and self.split == "train" else sample


def _raises(sample: dict[str, Any]) -> Any:
    raise OSError(5, "Input/output error")


def _exits(sample: dict[str, Any]) -> Any:
    raise SystemExit(0)


WRONG: Mapping[str, Callable[[dict[str, Any]], Any]] = {
    "raises": _raises,
    "exits": _exits,
    "a list": lambda sample: list(sample.values()),
    "none": lambda sample: None,
    "text": lambda sample: sample | {"input_ids": "text"},
    "another field": lambda sample: sample | {"more": torch.zeros(3)},
    "a missing field": lambda sample: {"input_ids": sample["input_ids"]},
    "floats": lambda sample: sample | {"input_ids": sample["input_ids"].float()},
    "too long": lambda sample: {k: v.repeat(9) for k, v in sample.items()},
    "too short": lambda sample: {k: v[1:] for k, v in sample.items()},
    "two dimensions": lambda sample: {k: v[None] for k, v in sample.items()},
    "a key": lambda sample: sample | {3: sample["labels"]},
    "sparse": lambda sample: sample | {"labels": sample["labels"].to_sparse()},
    "meta": lambda sample: sample | {"labels": sample["labels"].to("meta")},
}


@pytest.mark.parametrize(
    ("kind", "num_workers"),
    [*((kind, 0) for kind in WRONG), ("raises", 1), ("exits", 1), ("floats", 1)],
)
def test_a_sample_that_is_wrong_is_named(kind: str, num_workers: int, tmp_path: Path) -> None:
    settings = lab.config(
        "data._target_=tests.reliability.test_bad_data.Broken",
        f"data.kind={kind}",
        f"num_workers={num_workers}",
    )
    ended = lab.run(settings, tmp_path / "run")
    assert_one_line(ended, "sample 11 of Broken")


GPT = (
    "model=gpt_tiny",
    "model.width=16",
    "model.num_layers=1",
    "model.num_heads=2",
    "model.vocab_size=16",
)
CUTS = {
    "fixed": ("accum=fixed", "accum.micro=3"),
    "budget": ("accum=budget", "accum.max_tokens=30"),
    "auto": ("accum=auto",),
    "packed": ("accum=auto", "accum.packed=true", *GPT),
}


class Misstated(toys.Rows):
    """Rows one of which is not as long as it is stated to be."""

    def __init__(self, by: int = 1, where: str = "train", split: str = "train") -> None:
        super().__init__(split=split)
        self.rows = toys.Rows(split=split)
        self.lengths[3] += by if where == split else 0

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


def lines_on(rows: str, *more: str) -> RunConfig:
    return lab.config(f"data._target_=tests.reliability.test_bad_data.{rows}", *more)


@pytest.mark.parametrize("by", [-1, 1])
@pytest.mark.parametrize("cut", CUTS)
def test_a_length_that_is_misstated_is_noticed_under_every_cut(
    cut: str, by: int, tmp_path: Path
) -> None:
    settings = lines_on("Misstated", f"data.by={by}", *CUTS[cut])
    length = len(toys.Rows()[3]["input_ids"])
    text = f"sample 3 of Misstated has {length} tokens, and {length + by} by"
    assert_one_line(lab.run(settings, tmp_path), text)


def test_a_length_that_is_misstated_is_noticed_in_an_evaluation(tmp_path: Path) -> None:
    settings = lines_on("Misstated", "data.where=held_out", "steps=1")
    assert_one_line(lab.run(settings, tmp_path), "sample 3 of Misstated has", "`lengths`")


class Outside(toys.Rows):
    """Rows of which some hold a value that is no token, or no class."""

    def __init__(
        self, field: str = "", value: int = 0, bad: str = "11", split: str = "train"
    ) -> None:
        super().__init__(split=split)
        self.field, self.value, self.bad = field, value, bad

    def __getitem__(self, index: int) -> Any:
        sample = dict(super().__getitem__(index))
        if self.bad in {"all", self.split, str(index)}:
            sample[self.field] = sample[self.field].clone()
            sample[self.field][1] = self.value
        return sample


@pytest.mark.parametrize("how", [("num_workers=0",), ("num_workers=1",), GPT], ids=str)
@pytest.mark.parametrize(
    ("field", "value"), [("input_ids", 16), ("input_ids", -1), ("labels", 99), ("labels", -2)]
)
def test_what_is_no_token_and_no_class_is_named(
    field: str, value: int, how: tuple[str, ...], tmp_path: Path
) -> None:
    settings = lines_on("Outside", f"data.field={field}", f"data.value={value}", *how)
    text = f"sample 11 of Outside: {field} holds {value} at position 1, and the model's"
    assert_one_line(lab.run(settings, tmp_path), text, "0 to 15")


@pytest.mark.parametrize(
    "more", ["data.bad=all accum=auto", "data.bad=all command=verify", "data.bad=held_out"]
)
def test_what_is_no_token_is_named_wherever_it_is_computed_on(more: str, tmp_path: Path) -> None:
    settings = lines_on("Outside", "data.field=input_ids", "data.value=16", *more.split())
    ended = lab.run(settings, tmp_path)
    assert_one_line(ended, "of Outside: input_ids holds 16 at position 1")


class Faulty(toys.Rows):
    """Rows of a class that fails outside of its samples."""

    def __init__(self, where: str = "", how: Any = "", **more: Any) -> None:
        super().__init__(**more)
        self.count, self.where, self.how = len(self.lengths), where, how
        self.fail("__init__")
        if where == "collate":
            self.collate = self.joined

    def fail(self, where: str) -> None:
        if self.where == where and self.how in {"exits", "raises"}:
            raise SystemExit(0) if self.how == "exits" else OSError("gone")

    def __len__(self) -> int:
        self.fail("__len__")
        return self.how if self.where == "__len__" else self.count  # type: ignore[no-any-return]

    def __getattribute__(self, name: str) -> Any:
        if name in {"lengths", "fingerprint"} and "where" in vars(self):
            self.fail(name)
        return super().__getattribute__(name)

    def joined(self, samples: Any) -> Any:
        self.fail("collate")
        wrong = {"a key": {3: torch.ones(2)}, "meta": {"labels": torch.ones(2, device="meta")}}
        return wrong[self.how]


@pytest.mark.parametrize(
    ("where", "how", "text"),
    [
        ("__init__", "exits", "test_bad_data.Faulty: SystemExit: 0"),
        ("__init__", "raises", "test_bad_data.Faulty: OSError: gone"),
        ("__len__", "exits", "`__len__` of Faulty: SystemExit: 0"),
        ("__len__", "-1", "`__len__` of Faulty gives -1; it must be a whole number"),
        ("__len__", "50.0", "`__len__` of Faulty gives 50.0; it must be a whole number"),
        ("lengths", "raises", "`lengths` of Faulty: OSError: gone"),
        ("lengths", "exits", "`lengths` of Faulty: SystemExit: 0"),
        ("fingerprint", "raises", "`fingerprint` of Faulty: OSError: gone"),
        ("collate", "exits", "`collate` of Faulty, on 1 samples"),
        ("collate", "a key", "`collate` of Faulty: the field 3 is named by a int"),
        ("collate", "meta", "`collate` of Faulty: field 'labels' is a meta tensor"),
    ],
)
def test_data_that_fail_outside_of_their_samples_are_told_in_a_line(
    where: str, how: str, text: str, tmp_path: Path
) -> None:
    settings = lines_on("Faulty", f"data.where={where}", f"data.how={how}")
    assert_one_line(lab.run(settings, tmp_path), text)


class Leaving(toys.Net):
    """Ends the process in its first forward."""

    def forward(self, input_ids: Any, fault: Any = None) -> Any:
        raise SystemExit(0)


def test_a_model_that_exits_is_no_run_that_is_done(tmp_path: Path) -> None:
    settings = lab.config("model._target_=tests.reliability.test_bad_data.Leaving")
    ended = lab.run(settings, tmp_path)
    assert (ended.code, ended.error.count("\n")) == (1, 0)
    assert "SystemExit: 0 (test_bad_data.py:" in ended.error


class Unmeasured:
    """The same rows in a class that takes no split and states no lengths; some are bad."""

    def __init__(self, kind: str = "raises", size: int = 203, bad: int = 1) -> None:
        self.kind, self.bad, self.rows = kind, bad, toys.Rows(size)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        sample = dict(self.rows[index])
        return WRONG[self.kind](sample) if 3 <= index < 3 + self.bad else sample


class Sound(toys.Rows):
    """What is left of `Broken` without its bad row."""

    def __init__(self, kind: str = "", **more: Any) -> None:
        super().__init__(**more)
        self.kept = [i for i in range(len(self.lengths)) if i != 11 or self.split != "train"]
        self.rows = toys.Rows(**more)
        self.lengths = self.lengths[self.kept]

    def __getitem__(self, index: int) -> Any:
        return self.rows[self.kept[index]]


def skipping(kind: str, *more: str, rows: str = "Broken") -> RunConfig:
    return lab.config(
        f"data._target_=tests.reliability.test_bad_data.{rows}",
        f"data.kind={kind}",
        "data.on_bad=skip",
        *more,
    )


def trained(folder: Path) -> dict[str, Any]:
    found = {n: value for n, value in lab.outcome(folder).items() if n not in ("meta", "ledger")}
    return found | {"ids": [e["ids"] for e in lab.logged(folder)["ledger"] if e["step"]]}


@pytest.fixture(scope="module")
def sound_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    assert lab.run(skipping("", rows="Sound"), folder).code == 0
    return folder


@pytest.mark.parametrize("kind", WRONG)
def test_a_bad_sample_of_ones_own_data_is_as_if_it_were_not_there(
    kind: str, tmp_path: Path, sound_run: Path
) -> None:
    ended = lab.run(skipping(kind), tmp_path / "run")
    assert ended.code == 0, ended
    assert "1 bad record is passed over" in " ".join(ended.screen.split())
    first = lab.logged(tmp_path / "run")["ledger"][0]
    assert (first["step"], first["bad_records"]) == (0, 1)
    assert "sample 11 of Broken" in first["records"][0]
    found, sound = trained(tmp_path / "run"), trained(sound_run)
    # Samples keep their own ids, so those behind the one that is left out are one higher.
    sound["ids"] = [[i + (i >= 11) for i in ids] for ids in sound["ids"]]
    lab.assert_same(found, sound, kind)


def test_a_bad_sample_is_passed_over_again_on_resume_and_in_evaluations(tmp_path: Path) -> None:
    settings = skipping("raises", "data.holdout=0.5", rows="Unmeasured")
    assert lab.run(settings, tmp_path / "whole").code == 0
    assert lab.run(settings, tmp_path / "run", after_step=lab.stop_at(3)).code == 75
    ended = lab.go_on(settings, tmp_path / "run")
    assert ended.code == 0, ended
    lab.assert_same(lab.outcome(tmp_path / "run"), lab.outcome(tmp_path / "whole"), "resumed")
    assert lab.logged(tmp_path / "run")["ledger"][0]["bad_records"] == 1


def test_other_bad_samples_than_before_are_changed_data(tmp_path: Path) -> None:
    settings = skipping("raises", rows="Unmeasured")
    assert lab.run(settings, tmp_path, after_step=lab.stop_at(3)).code == 75
    params = {**settings.data.params, "bad": 2}
    data = settings.data.model_copy(update={"params": params})
    changed = settings.model_copy(update={"data": data})
    assert_one_line(lab.run(changed, tmp_path, resume=True), "resume_allow=[data]")


def test_too_many_bad_samples_of_ones_own_data_are_not_passed_over(tmp_path: Path) -> None:
    settings = skipping("raises", "+data.bad=3", rows="Unmeasured")
    ended = lab.run(settings, tmp_path)
    assert_one_line(ended, "3 of the first 6 samples are bad", "sample 3 of Unmeasured")


def test_a_sample_that_goes_bad_later_ends_the_run_and_is_named(tmp_path: Path) -> None:
    def spoil(step: int) -> None:
        if step == 2:
            shutil.move(tmp_path / "row", tmp_path / "gone")

    (tmp_path / "row").touch()
    settings = skipping("later", f"+data.path={tmp_path / 'row'}", rows="Fading")
    ended = lab.run(settings, tmp_path / "run", after_step=spoil)
    assert_one_line(ended, "of Fading", "gone bad")


class Fading(toys.Rows):
    """Rows that can be read as long as a file is there."""

    def __init__(self, kind: str = "", path: str = "", **more: Any) -> None:
        super().__init__(**more)
        self.path = Path(path)

    def __getitem__(self, index: int) -> Any:
        if not self.path.exists():
            raise OSError("gone bad")
        return super().__getitem__(index)


# Harness 22


def corpus(folder: Path) -> Path:
    texts = folder / "texts"
    texts.mkdir(exist_ok=True)
    for name in "abcdefgh":
        (texts / f"{name}.txt").write_text(f"document {name} of the corpus")
    return texts


def rewrite(path: Path, content: str) -> None:
    """Change a file and leave its times as they were, where the file system lets us."""
    times = path.stat()
    path.write_text(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns + 1))


def append(texts: Path) -> None:
    (texts / "i.txt").write_text("one more")


def delete(texts: Path) -> None:
    (texts / "c.txt").unlink()


def swap(texts: Path) -> None:
    first, second = (texts / "a.txt").read_text(), (texts / "b.txt").read_text()
    rewrite(texts / "a.txt", second)
    rewrite(texts / "b.txt", first)


def change_one_byte(texts: Path) -> None:
    rewrite(texts / "d.txt", (texts / "d.txt").read_text().replace("corpus", "corpse"))


def rename_to_another_place(texts: Path) -> None:
    (texts / "a.txt").rename(texts / "z.txt")


def lengthen(texts: Path) -> None:
    rewrite(texts / "e.txt", (texts / "e.txt").read_text() + "!")


def empty_into_another(texts: Path) -> None:
    rewrite(texts / "f.txt", (texts / "g.txt").read_text())


def copy_one(texts: Path) -> None:
    (texts / "aa.txt").write_text((texts / "a.txt").read_text())


MUTATIONS = [
    append,
    delete,
    swap,
    change_one_byte,
    rename_to_another_place,
    lengthen,
    empty_into_another,
    copy_one,
]


@pytest.mark.parametrize("mutate", MUTATIONS)
def test_data_that_changed_are_refused_on_resume(
    mutate: Callable[[Path], None], tmp_path: Path
) -> None:
    texts = corpus(tmp_path)
    settings = settings_of(texts, "data.max_length=40")
    assert lab.run(settings, tmp_path / "run", after_step=lab.stop_at(1)).code == 75
    mutate(texts)
    ended = lab.run(settings, tmp_path / "run", resume=True)
    assert_one_line(ended, "data", "resume_allow=[data]")
    allowed = settings.model_copy(update={"resume_allow": ("data",)})
    assert lab.run(allowed, tmp_path / "run", resume=True).code == 0


def test_data_that_are_the_same_go_on(tmp_path: Path) -> None:
    texts = corpus(tmp_path)
    settings = settings_of(texts)
    assert lab.run(settings, tmp_path / "run", after_step=lab.stop_at(1)).code == 75
    for path in texts.iterdir():
        path.touch()
    assert lab.run(settings, tmp_path / "run", resume=True).code == 0


CONTRACT = [
    "batch.global=9",
    "batch.tail=drop",
    "batch.normalizer=samples",
    "seed=1",
    "data.size=24",
    "data.faults=['3:oom']",
    "model.width=16",
    "model.dropout=0.5",
    "objective.z_loss=0.1",
    "optimizer.lr=0.5",
    "optimizer=sgd",
    "scheduler=constant",
    "scheduler.warmup=2",
    "clip_norm=0.5",
    "precision=bf16",
    "steps=3",
]
EXECUTION = ["accum.micro=2", "num_workers=1", "checkpoint.every=1", "log.every=3", "steps=9"]


@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("place") / "run"
    line = [*lab.BASE, f"hydra.run.dir={run}"]
    toys.after_step = lab.stop_at(4)
    assert cli.run(line) == 75
    toys.after_step = None
    return run


@pytest.mark.parametrize("change", CONTRACT)
def test_another_step_is_refused_with_both_values(
    change: str, stopped_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in stopped_run.rglob("*")}
    assert cli.run([f"resume={stopped_run}", *_own(), change]) == 2
    said = capsys.readouterr().err
    lines = said.splitlines()
    assert all(line.startswith("train: error: ") and len(line) <= 220 for line in lines), said
    key = change.partition("=")[0]
    assert any(key in line and "resume_allow=[" in line for line in lines), said
    assert {path: path.stat().st_mtime_ns for path in stopped_run.rglob("*")} == before


@pytest.mark.parametrize("change", EXECUTION)
def test_another_execution_is_free(change: str, stopped_run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(stopped_run, copy)
    assert cli.run([f"resume={copy}", *_own(), change]) == 0


def _own() -> list[str]:
    """The classes of one's own have to be typed again: a run folder gives no consent."""
    return [line for line in lab.BASE if "tests.reliability" in line]


@pytest.fixture(autouse=True)
def _no_watch() -> Iterator[None]:
    yield
    toys.after_step = None
