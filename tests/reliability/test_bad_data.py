"""Harnesses 21 and 22: data that are damaged, and data that are not those the run began with."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from tests.reliability import lab, toys
from trainer.config.run_config import RunConfig
from trainer.core.errors import DataError
from trainer.core.world import World
from trainer.data.loader import Loader, Request
from trainer.data.source import readable
from trainer.data.text import Text
from trainer.data.view import DataView

HERE = "tests.reliability.test_bad_data"


def lines_on(rows: str, *more: str) -> RunConfig:
    return lab.config(f"data._target_={HERE}.{rows}", *more)


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
    typed = ("data=text", f"data.path={path}", "model.vocabulary=258", "steps=2")
    assert_one_line(lab.run(lab.config(*typed), tmp_path / "stopped"), f"{path}:8")
    ended = lab.run(lab.config(*typed, "data.on_bad=skip"), tmp_path / "run")
    assert_passed_over(ended, tmp_path / "run", f"{path}:8: ")


class Broken(toys.Rows):
    """Rows of a user, some of which are wrong in the way `kind` says: by index, in a split, all."""

    def __init__(self, kind: str = "raises", bad: str = "11", **more: Any) -> None:
        super().__init__(**more)
        self.kind, self.bad = kind, bad

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        is_bad = self.bad in {"all", self.split, str(index)}
        return (KINDS | NUMBERS)[self.kind](dict(sample)) if is_bad else sample


class Apart(Broken):
    """The same with a split of their own, whose held-out part is wrong."""

    def __init__(self, kind: str = "raises", split: str = "train") -> None:
        super().__init__(kind, "held_out", split=split)


def _raises(*_: Any) -> Any:
    raise OSError(5, "Input/output error")


def _exits(*_: Any) -> Any:
    raise SystemExit(0)


KINDS = {
    "raises": _raises,
    "exits": _exits,
    "a list": lambda sample: list(sample.values()),
    "text": lambda sample: sample | {"input_ids": "text"},
    "another field": lambda sample: sample | {"more": torch.zeros(3)},
    "floats": lambda sample: sample | {"input_ids": sample["input_ids"].float()},
    "too_long": lambda sample: {k: v.repeat(9) for k, v in sample.items()},
    "too_short": lambda sample: {k: v[1:] for k, v in sample.items()},
    "sparse": lambda sample: sample | {"labels": sample["labels"].to_sparse()},
    "meta": lambda sample: sample | {"labels": sample["labels"].to("meta")},
}
SAYS = {
    "a list": "it must be a mapping",
    "text": "become a dense tensor",
    "too_long": "`lengths`",
}
SECOND = torch.tensor([1])
NUMBERS = {
    "input_ids_16": lambda s: s | {"input_ids": s["input_ids"].index_fill(0, SECOND, 16)},
    "labels_-2": lambda s: s | {"labels": s["labels"].index_fill(0, SECOND, -2)},
}


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
    stopped = lab.run(lines_on("Broken", "data.kind=exits", "num_workers=1"), tmp_path / "stopped")
    assert_one_line(stopped, "sample 11 of Broken")
    ended = lab.run(lines_on("Broken", "data.kind=floats", "data.on_bad=skip"), tmp_path / "run")
    assert_passed_over(ended, tmp_path / "run", "sample 11 of Broken")
    assert lab.run(lines_on("Sound", "data.on_bad=skip"), tmp_path / "sound").code == 0
    sound = trained(tmp_path / "sound")
    # Samples keep their own ids, so those behind the one that is left out are one higher.
    sound["ids"] = [[i + (i >= 11) for i in ids] for ids in sound["ids"]]
    lab.assert_same(trained(tmp_path / "run"), sound, "one left out")


class Poisoned(toys.Net):
    """Breaks for good, as a GPU does, where it is given a number beyond its table."""

    def forward(self, input_ids):
        if not isinstance(input_ids, FakeTensor) and int(input_ids.max()) >= toys.VOCABULARY:
            os._exit(77)
        return super().forward(input_ids)


TOKEN = "input_ids holds 16 at position 1, and the model's vocabulary is 0 to 15"
LABEL = "labels holds -2 at position 1, and the model's classes, but for -100, are"


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("Broken data.kind=too_long", "sample 11 of Broken has 27 tokens, but `lengths`"),
        ("Apart data.kind=too_short steps=1", "of Apart has"),
        ("Broken data.kind=input_ids_16", f"sample 11 of Broken: {TOKEN}"),
        ("Apart data.kind=input_ids_16", TOKEN),
        ("Broken data.kind=input_ids_16 data.bad=all accum=auto objective=next_token", TOKEN),
        ("Broken data.kind=input_ids_16 data.bad=all command=verify objective=next_token", TOKEN),
        ("Broken data.kind=labels_-2", f"sample 11 of Broken: {LABEL}"),
    ],
)
def test_a_length_or_value_that_is_wrong_is_named_wherever_it_is_used_and_no_device_sees_it(
    line, text, tmp_path
):
    settings = lines_on(*line.split(), f"model._target_={HERE}.Poisoned")
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


@pytest.mark.parametrize(
    ("where", "how", "text"),
    [
        ("__len__", _exits, "`__len__` of Faulty: SystemExit: 0"),
        ("lengths", property(_raises), "`lengths` of Faulty: OSError: [Errno 5]"),
        ("vocab_size", "many", "`vocab_size` of Faulty: TypeError"),
        ("fingerprint", _raises, "`fingerprint` of Faulty: OSError: [Errno 5]"),
        ("collate", _exits, "`collate` of Faulty, on 2 samples (0, 1, ...): SystemExit"),
        ("collate", lambda *_: [1], "`collate` of Faulty must return a mapping from names to"),
    ],
)
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
    ended = lab.run(lab.config(f"model._target_={HERE}.Leaving"), tmp_path / "model")
    assert (ended.code, ended.error.count("\n")) == (1, 0)
    assert "SystemExit: 0 (test_bad_data.py:" in ended.error


def test_bad_samples_are_passed_over_again_on_resume_and_others_are_changed_data(tmp_path):
    line = ("Unmeasured", "data.on_bad=skip", "data.holdout=0.5")
    settings = lines_on(*line)
    assert lab.run(settings, tmp_path / "whole").code == 0
    assert lab.run(settings, tmp_path / "run", after_step=lab.stop_at(3)).code == 75
    changed = lab.run(lines_on(*line, "data.bad=2"), tmp_path / "run", resume=True)
    assert_one_line(changed, "resume_allow=[data]")
    ended = lab.go_on(settings, tmp_path / "run")
    assert ended.code == 0, ended
    lab.assert_same(lab.outcome(tmp_path / "run"), lab.outcome(tmp_path / "whole"), "resumed")
    assert lab.logged(tmp_path / "run")["ledger"][0]["bad_records"] == 1


def test_too_many_bad_samples_of_ones_own_data_are_not_passed_over():
    text = "3 of the first 6 samples are bad, .* the first: sample 3 of Unmeasured"
    with pytest.raises(DataError, match=text):
        readable([DataView(Unmeasured(bad=3))], 0, World())


def rewrite(path: Path, content: str) -> None:
    """Change a file and leave its times as they were, where the file system lets us."""
    times = path.stat()
    path.write_text(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns + 1))


def test_every_change_of_the_data_is_one_of_their_fingerprint(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for name in "abcd":
        (texts / f"{name}.txt").write_text(f"document {name} of the corpus")
    prints = []

    def note_fingerprint() -> None:
        prints.append(Text(str(texts), max_length=40).facts().fingerprint())

    note_fingerprint()
    for path in texts.iterdir():
        path.touch()
    note_fingerprint()
    assert prints.pop() == prints[0]
    rewrite(texts / "a.txt", "document b of the corpus")
    rewrite(texts / "b.txt", "document a of the corpus")
    note_fingerprint()  # two are exchanged
    rewrite(texts / "d.txt", "document d of the corpse")
    note_fingerprint()
    (texts / "a.txt").rename(texts / "z.txt")
    note_fingerprint()
    (texts / "zz.txt").write_text((texts / "z.txt").read_text())
    note_fingerprint()
    (texts / "c.txt").unlink()
    note_fingerprint()
    assert len(set(prints)) == len(prints) == 6
