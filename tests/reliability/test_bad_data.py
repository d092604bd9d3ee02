"""Harnesses 21 and 22: data that are damaged, and data that are not the ones the run began with.

Each damage ends with exit 3 and one line that names file and record; `data.on_bad=skip` passes
over what is bad in a corpus, counts it, lists it, and stops where it is too much. Data that
changed under a run are told by their fingerprint, whatever was changed. What the readers refuse
stands in `tests/unit/data`.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from tests.lib.nightly import slow
from tests.reliability import lab, toys
from trainer.config.run_config import RunConfig
from trainer.core.errors import DataError
from trainer.core.world import World
from trainer.data.bad_samples import readable
from trainer.data.loader import Loader, Request
from trainer.data.text import Text
from trainer.data.view import DataView

TEXT = (
    *("data=text", "data.max_length=24", "model._target_=tests.reliability.toys.Net"),
    *("model.vocabulary=258", "steps=2", "batch.global=4", "eval.every=null"),
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRAIN_CACHE", str(tmp_path / "cache"))
    yield
    toys.after_step = None


def settings_of(path: Path, *more: str) -> RunConfig:
    keys = {line.partition("=")[0] for line in more}
    base = [line for line in TEXT if line.partition("=")[0] not in keys]
    return lab.config.__wrapped__(*base, *more, f"data.path={path}")  # type: ignore[no-any-return]


def lines_on(rows: str, *more: str) -> RunConfig:
    return lab.config(f"data._target_=tests.reliability.test_bad_data.{rows}", *more)


def assert_one_line(ended: lab.Ended, *named: str) -> None:
    assert ended.code == 3, ended
    assert "\n" not in ended.error
    for name in named:
        assert name in ended.error, ended.error


def assert_passed_over(ended: lab.Ended, folder: Path, named: str) -> None:
    assert ended.code == 0, ended
    assert "1 bad record skipped" in " ".join(ended.screen.split())
    first, *others = lab.logged(folder)["ledger"]
    assert (first["step"], first["ids"], first["bad_records"]) == (0, [], 1)
    assert named in first["records"][0]
    assert [entry["step"] for entry in others] == list(range(1, len(others) + 1))


def test_a_bad_record_is_named_or_passed_over_counted_and_listed(tmp_path):
    lines = [json.dumps({"text": f"document number {i} of the corpus"}) for i in range(60)]
    lines[7] = "document"
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(lines))
    assert_one_line(lab.run(settings_of(path), tmp_path / "stopped"), f"{path}:8")
    ended = lab.run(settings_of(path, "data.on_bad=skip"), tmp_path / "run")
    assert_passed_over(ended, tmp_path / "run", f"{path}:8: ")


def corpus(folder: Path) -> Path:
    texts = folder / "texts"
    texts.mkdir(exist_ok=True)
    for name in "abcdefgh":
        (texts / f"{name}.txt").write_text(f"document {name} of the corpus")
    return texts


class Broken(toys.Rows):
    """Rows of a user, some of which are wrong in the way `kind` says: by index, in a split, all."""

    def __init__(self, kind: str = "raises", bad: str = "11", **more: Any) -> None:
        super().__init__(**more)
        self.kind, self.bad = kind, bad

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        is_bad = self.bad in {"all", self.split, str(index)}
        return WRONG[self.kind](dict(sample)) if is_bad else sample


class Apart(Broken):
    """The same with a split of their own, whose held-out part is wrong."""

    def __init__(self, kind: str = "raises", split: str = "train") -> None:
        super().__init__(kind, "held_out", split=split)


def _raises(sample: dict[str, Any]) -> Any:
    raise OSError(5, "Input/output error")


def _exits(sample: dict[str, Any]) -> Any:
    raise SystemExit(0)


def holding(field: str, value: int) -> Callable[[dict[str, Any]], Any]:
    """Put a value that is no token, or no class, at the second position."""
    return lambda sample: {
        k: torch.cat([v[:1], torch.tensor([value]), v[2:]]) if k == field else v
        for k, v in sample.items()
    }


KINDS: Mapping[str, Callable[[dict[str, Any]], Any]] = {
    "raises": _raises,
    "exits": _exits,
    "a list": lambda sample: list(sample.values()),
    "none": lambda sample: None,
    "text": lambda sample: sample | {"input_ids": "text"},
    "another field": lambda sample: sample | {"more": torch.zeros(3)},
    "a missing field": lambda sample: {"input_ids": sample["input_ids"]},
    "floats": lambda sample: sample | {"input_ids": sample["input_ids"].float()},
    "too long": lambda sample: {k: v.repeat(9) for k, v in sample.items()},
    "one_short": lambda sample: {k: v[1:] for k, v in sample.items()},
    "one_long": lambda sample: {k: torch.cat([v, v[:1]]) for k, v in sample.items()},
    "a key": lambda sample: sample | {3: sample["labels"]},
    "sparse": lambda sample: sample | {"labels": sample["labels"].to_sparse()},
    "meta": lambda sample: sample | {"labels": sample["labels"].to("meta")},
}
SAYS = {
    "a list": "it must be a mapping",
    "text": "become a dense tensor",
    "too long": "`lengths`",
}
VALUES = (("input_ids", 16), ("labels", 99), ("input_ids", -1), ("labels", -2))
WRONG = {**KINDS, **{f"{name}_{value}": holding(name, value) for name, value in VALUES}}


class Sound(toys.Rows):
    """What is left of `Broken` without its bad row."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.rows = toys.Rows(**more)
        self.ids = [i for i in range(len(self.rows)) if i != 11]
        self.lengths = self.lengths[self.ids]

    def __getitem__(self, index: int) -> Any:
        return self.rows[self.ids[index]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_that_is_wrong_is_named_or_left_out(kind):
    broken = Broken(kind)
    request = Request((3, 11), 0, int(broken.lengths[[3, 11]].max()))
    with pytest.raises(DataError, match=f"sample 11 of Broken.*{SAYS.get(kind, '')}") as caught:
        Loader(broken, num_workers=0, seed=0).load(request)
    assert "\n" not in str(caught.value)
    (view,) = readable([DataView(broken)], 0, World())
    assert view.original_ids(range(len(view))).tolist() == Sound().ids
    assert view.lengths[:].tolist() == Sound().lengths.tolist()
    assert view.num_skipped == 1
    assert "sample 11 of Broken" in view.skipped[0]


def trained(folder: Path) -> dict[str, Any]:
    found = {n: value for n, value in lab.outcome(folder).items() if n not in ("parts", "ledger")}
    return found | {"ids": [e["ids"] for e in lab.logged(folder)["ledger"] if e["step"]]}


def test_a_run_without_its_wrong_sample_is_as_if_it_were_not_there(tmp_path):
    for kind, workers in (("floats", 0), ("exits", 1)):
        settings = lines_on("Broken", f"data.kind={kind}", f"num_workers={workers}")
        assert_one_line(lab.run(settings, tmp_path / kind), "sample 11 of Broken")
    ended = lab.run(lines_on("Broken", "data.kind=floats", "data.on_bad=skip"), tmp_path / "run")
    assert_passed_over(ended, tmp_path / "run", "sample 11 of Broken")
    assert lab.run(lines_on("Sound", "data.on_bad=skip"), tmp_path / "sound").code == 0
    sound = trained(tmp_path / "sound")
    # Samples keep their own ids, so those behind the one that is left out are one higher.
    sound["ids"] = [[i + (i >= 11) for i in ids] for ids in sound["ids"]]
    lab.assert_same(trained(tmp_path / "run"), sound, "one left out")


GPT = "model=gpt_tiny model.width=16 model.num_layers=1 model.num_heads=2 model.vocab_size=16"
SHORT, SHORTER = "data.kind=one_short", "sample 11 of Broken has 2 tokens, but `lengths`"
LABEL = (
    "sample 11 of Broken: labels holds {} at position 1, and the model's classes, but for -100, are"
)
TOKEN = "of Broken: input_ids holds 16 at position 1, and the model's vocabulary is 0 to 15"


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("Broken data.kind=one_long", "sample 11 of Broken has 4 tokens, but `lengths`"),
        slow(f"Broken {SHORT} accum=auto accum.packed=true {GPT}", SHORTER),
        (f"Apart {SHORT} steps=1", "of Apart has"),
        ("Apart data.kind=input_ids_16", TOKEN.replace("Broken", "Apart")),
        ("Broken data.kind=input_ids_16 data.bad=all accum=auto objective=next_token", TOKEN),
        ("Broken data.kind=input_ids_16 data.bad=all command=verify objective=next_token", TOKEN),
        slow("Broken data.kind=input_ids_-1 num_workers=1", "input_ids holds -1 at position 1"),
        ("Broken data.kind=labels_99", LABEL.format(99)),
        slow(f"Broken data.kind=labels_-2 num_workers=1 {GPT}", LABEL.format(-2)),
    ],
)
def test_a_length_and_a_value_that_are_wrong_are_named_wherever_they_are_used(line, text, tmp_path):
    rows, *more = line.split()
    assert_one_line(lab.run(lines_on(rows, *more), tmp_path), text)


class Poisoned(toys.Net):
    """Breaks for good, as a GPU does, where it is given a number beyond its table."""

    def forward(self, input_ids):
        if not isinstance(input_ids, FakeTensor) and int(input_ids.max()) >= toys.VOCABULARY:
            os._exit(77)
        return super().forward(input_ids)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("Broken", f"sample 11 {TOKEN}"),
        slow("Broken num_workers=1", f"sample 11 {TOKEN}"),
        slow("Apart", TOKEN.replace("Broken", "Apart")),
        slow("Broken data.bad=all accum=auto objective=next_token", TOKEN),
    ],
    ids=["step", "worker", "evaluation", "tuning"],
)
def test_no_device_sees_a_number_beyond_a_table(line, text, tmp_path):
    rows, *more = line.split()
    model = "model._target_=tests.reliability.test_bad_data.Poisoned"
    settings = lines_on(rows, *more, model, "data.kind=input_ids_16")
    assert_one_line(lab.run(settings, tmp_path), text)


class Unmeasured:
    """The same rows in a class that takes no split and states no lengths; some are bad."""

    def __init__(self, size: int = 203, bad: int = 1) -> None:
        self.bad, self.rows = bad, toys.Rows(size)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        if 3 <= index < 3 + self.bad:
            raise OSError("gone")
        return dict(self.rows[index])


def _gone(*_: Any) -> Any:
    raise OSError("gone")


FAULTS: Sequence[tuple[str, Any, str]] = (
    ("__len__", _exits, "`__len__` of Faulty: SystemExit: 0"),
    ("__len__", lambda _: -1, "`__len__` of Faulty: ValueError: __len__() should return >= 0"),
    ("lengths", property(_gone), "`lengths` of Faulty: OSError: gone"),
    ("vocab_size", "many", "`vocab_size` of Faulty: TypeError"),
    ("fingerprint", _gone, "`fingerprint` of Faulty: OSError: gone"),
    ("collate", lambda *_: _exits({}), "`collate` of Faulty, on 2 samples (0, 1, ...): SystemExit"),
    ("collate", lambda *_: [1], "`collate` of Faulty must return a mapping from names to tensors"),
    (
        "collate",
        lambda *_: {"labels": torch.ones(2, device="meta")},
        "`collate` of Faulty: field 'labels' is a Tensor, which cannot become a dense tensor",
    ),
)


@pytest.mark.parametrize(("where", "how", "text"), FAULTS, ids=range(len(FAULTS)))
def test_data_that_fail_outside_of_their_samples_are_named_in_a_line(where, how, text):
    faulty = type("Faulty", (Unmeasured,), {where: how})(bad=0)

    def use() -> None:
        view = DataView(faulty)
        print(view.facts, view.lengths, view.fingerprint)
        Loader(view, num_workers=0, seed=0).load(Request((0, 1), 0, 9))

    with pytest.raises(DataError) as caught:
        use()
    assert str(caught.value).startswith(f"data: {text}")
    assert "\n" not in str(caught.value)


class Leaving(toys.Net):
    """Ends the process in its first forward."""

    def forward(self, input_ids: Any, fault: Any = None) -> Any:
        raise SystemExit(0)


def leaving_data() -> Any:
    raise SystemExit(0)


def test_data_and_models_that_exit_are_no_run_that_is_done(tmp_path):
    ended = lab.run(lines_on("leaving_data"), tmp_path / "data")
    assert_one_line(ended, "test_bad_data.leaving_data: SystemExit: 0")
    leaving = lab.config("model._target_=tests.reliability.test_bad_data.Leaving")
    ended = lab.run(leaving, tmp_path / "model")
    assert (ended.code, ended.error.count("\n")) == (1, 0)
    assert "SystemExit: 0 (test_bad_data.py:" in ended.error


def test_bad_samples_are_passed_over_again_on_resume_and_others_are_changed_data(tmp_path):
    settings = lines_on("Unmeasured", "data.on_bad=skip", "data.holdout=0.5")
    assert lab.run(settings, tmp_path / "whole").code == 0
    assert lab.run(settings, tmp_path / "run", after_step=lab.stop_at(3)).code == 75
    data = settings.data.model_copy(update={"params": {**settings.data.params, "bad": 2}})
    changed = settings.model_copy(update={"data": data})
    assert_one_line(lab.run(changed, tmp_path / "run", resume=True), "resume_allow=[data]")
    ended = lab.go_on(settings, tmp_path / "run")
    assert ended.code == 0, ended
    lab.assert_same(lab.outcome(tmp_path / "run"), lab.outcome(tmp_path / "whole"), "resumed")
    assert lab.logged(tmp_path / "run")["ledger"][0]["bad_records"] == 1


def test_too_many_bad_samples_of_ones_own_data_are_not_passed_over():
    text = "3 of the first 6 samples are bad, .* the first: sample 3 of Unmeasured"
    with pytest.raises(DataError, match=text):
        readable([DataView(Unmeasured(bad=3))], 0, World())


# Harness 22


def rewrite(path: Path, content: str) -> None:
    """Change a file and leave its times as they were, where the file system lets us."""
    times = path.stat()
    path.write_text(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns + 1))


def swap(texts: Path) -> None:
    first, second = ((texts / name).read_text() for name in ("a.txt", "b.txt"))
    rewrite(texts / "a.txt", second)
    rewrite(texts / "b.txt", first)


MUTATIONS: Mapping[str, Callable[[Path], Any]] = {
    "append": lambda texts: (texts / "i.txt").write_text("one more"),
    "delete": lambda texts: (texts / "c.txt").unlink(),
    "swap": swap,
    "one word": lambda texts: rewrite(texts / "d.txt", "document d of the corpse"),
    "another place": lambda texts: (texts / "a.txt").rename(texts / "z.txt"),
    "copy": lambda texts: (texts / "aa.txt").write_text((texts / "a.txt").read_text()),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_every_change_of_the_data_is_one_of_their_fingerprint(mutation, tmp_path):
    texts = corpus(tmp_path)
    before = Text(str(texts), max_length=40).facts().fingerprint()
    for path in texts.iterdir():
        path.touch()
    assert Text(str(texts), max_length=40).facts().fingerprint() == before
    MUTATIONS[mutation](texts)
    assert Text(str(texts), max_length=40).facts().fingerprint() != before


@pytest.mark.slow
def test_data_that_changed_are_refused_on_resume(tmp_path):
    texts = corpus(tmp_path)
    settings = settings_of(texts, "data.max_length=40")
    assert lab.run(settings, tmp_path / "run", after_step=lab.stop_at(1)).code == 75
    MUTATIONS["one word"](texts)
    ended = lab.run(settings, tmp_path / "run", resume=True)
    assert_one_line(ended, "data", "resume_allow=[data]")
    allowed = settings.model_copy(update={"resume_allow": ("data",)})
    assert lab.run(allowed, tmp_path / "run", resume=True).code == 0
