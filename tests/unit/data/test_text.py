"""One's own text: paragraphs, files, JSON lines, and records that are bad."""

import json
from pathlib import Path

import pytest

from tests.lib.support import documents_of
from trainer.core.errors import DataError
from trainer.data.files import Listing
from trainer.data.text import Text

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def folder(tmp_path):
    """A folder without the cache in it."""
    (tmp_path / "corpus").mkdir()
    return tmp_path / "corpus"


def texts(path, **settings):
    return documents_of(Text(str(path), **{"max_length": 10_000, "holdout": 0.0} | settings))


def jsonl(path, *records):
    lines = [r if isinstance(r, bytes) else json.dumps(r).encode() for r in records]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def test_a_plain_file_gives_one_document_per_paragraph_wherever_its_path_begins(
    tmp_path, monkeypatch
):
    file = tmp_path / "text.txt"
    file.write_bytes("\ufeffone\ntwo\n\n \t\n\nthree ä\r\n\r\n  four\n".encode())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in (file, Path("text.txt"), "~/text.txt"):
        assert texts(path) == ["one\ntwo", "three ä", "  four"]


def test_a_folder_gives_one_document_per_file_in_order_and_json_lines_one_per_record(folder):
    (folder / "b" / ".git").mkdir(parents=True)
    (folder / "b" / "z.md").write_text("one\n\ntwo\n")
    (folder / "a.txt").write_text("first")
    (folder / ".hidden").write_text("no")
    (folder / "b" / ".git" / "config").write_text("no")
    jsonl(folder / "c.jsonl", {"text": "x"}, {"text": "y"})
    assert texts(folder) == ["first", "one\n\ntwo", "x", "y"]
    named = jsonl(folder / "a.txt", {"body": "ä\n\nb"})
    assert texts(named, field="body") == ["ä\n\nb"], "so it is JSON lines"


@pytest.mark.parametrize("name", ["a.JSONL", "a.jsonlines", "a.ndjson", "a.json"])
def test_json_lines_are_known_by_their_suffix(folder, name):
    file = jsonl(folder / name, b"", {"text": "one", "body": "x"}, b"  ", {"text": "two"})
    with pytest.raises(DataError, match=f"{name}:4: no field 'body'; it has 'text'"):
        texts(folder, field="body")
    assert texts(file) == ["one", "two"]
    file.write_text('{\n"text": "two"\n}\n')
    with pytest.raises(DataError, match=rf"{name}:1: not JSON"):
        Text(str(file))


def test_without_learning_a_record_that_is_bad_has_its_reason_however_many_are(tmp_path):
    file = tmp_path / "new.jsonl"
    file.write_text('{"text": null}\n{"text": "good"}\n{"body": "a"}\n')
    found = Text(str(file), on_bad="skip", learns=False).predicted_records()
    first, second, third = found
    assert first.why_none == "field 'text' is of type NoneType, not a string"
    assert [*second.samples] == [0]
    assert (third.place, third.why_none[:16]) == ("new.jsonl:3", "no field 'text';")
    file.write_text('{"text": null}\n')
    with pytest.raises(DataError, match=r"new\.jsonl:1: field 'text' is of type"):
        Text(str(file), learns=False)


def test_bad_records_may_be_skipped_up_to_a_share(tmp_path):
    good = [{"text": f"document {k}"} for k in range(297)]
    file = jsonl(tmp_path / "few.jsonl", *good, b"{", b"[]", b"3")
    for _ in range(2):  # built, and opened
        dataset = Text(str(file), on_bad="skip", holdout=0.0)
        assert (len(dataset), dataset.facts().num_skipped) == (297, 3)
        second = dataset.facts().skipped[1]
        assert second.startswith(f"{file}:299: not a JSON object but of type list")
    more = jsonl(tmp_path / "more.jsonl", *good, b"{", b"[]", b"3", b"4")
    fault = r"4 of 301 records are bad, more than the 1%.*:298: not JSON"
    with pytest.raises(DataError, match=fault):
        Text(str(more), on_bad="skip")


def test_data_that_hold_nothing_or_vanish_are_a_data_error(tmp_path, monkeypatch):
    (tmp_path / "blank.txt").write_text("\n \n")
    (tmp_path / "array.json").write_text("[]")
    (tmp_path / "folder").mkdir()
    kinds = {"blank.txt": "documents", "array.json": "documents", "folder": "files"}
    for name, kind in kinds.items():
        with pytest.raises(DataError, match=f"{name}.*holds no {kind}"):
            Text(str(tmp_path / name))
    listing = Listing([tmp_path / "gone.txt"])
    monkeypatch.setattr("trainer.data.text.files_at", lambda *_, **__: listing)
    with pytest.raises(DataError, match=r"cannot read .*gone\.txt: No such file"):
        Text(str(tmp_path))
