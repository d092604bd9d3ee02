"""Files of a user's own: lines, cells, literal paths, and folders, in every kind of data alike."""

import gzip
import json
import os
import pty
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.lib.hf_toys import write_lines
from tests.lib.support import documents_of
from trainer.core.errors import DataError
from trainer.data import files
from trainer.data.samples import data_facts
from trainer.data.text import Text
from trainer.data.tokens import TokenWindows
from trainer.features.hugging_face.data_set import HuggingFaceData
from trainer.features.hugging_face.tokenizers import byte_tokenizer
from trainer.features.vision.image_text import ImageText
from trainer.features.vision.images import ImageFolders


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAIN_CACHE", str(tmp_path / "cache[1]"))
    (tmp_path / "files").mkdir()
    return tmp_path / "files"


def text(path: Path) -> Any:
    return Text(str(path), max_length=10_000, holdout=0.0)


def hf(path: Path, task: Any = None) -> Any:
    return HuggingFaceData(str(path), byte_tokenizer(), task, holdout=0.0)


def hf_texts(data: HuggingFaceData) -> list[str]:
    ids = (data[i]["input_ids"].tolist() for i in range(len(data)))
    return [bytes(i for i in each if i < 256).decode() for each in ids]


def image_text(path: Path) -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([*ImageText.special_tokens], special_tokens=True)
    return ImageText(tokenizer, str(path))


def prompts(data: ImageText) -> list[str]:
    found = (data.decode(data[i]["input_ids"].tolist()) for i in range(len(data)))
    return [each.rpartition("<image>")[2].partition("!")[0] for each in found]


ODD = "a\u2028b\u0085c\x0bd"
"""Characters at which `str.splitlines` divides, and no line ends."""

Read = Callable[[Path], list[str]]
READERS: dict[str, tuple[str, Read]] = {
    "text lines": ("a.jsonl", lambda path: documents_of(text(path))),
    "hf lines": ("a.jsonl", lambda path: hf_texts(hf(path))),
    "image_text": ("image.jsonl", lambda path: prompts(image_text(path))),
    "text paragraphs": ("a.txt", lambda path: documents_of(text(path))),
    "hf paragraphs": ("a.txt", lambda path: hf_texts(hf(path))),
    "hf table": ("a.csv", lambda path: hf_texts(hf(path))),
}


def records_of(name: str, texts: list[str]) -> list[bytes]:
    """Write texts as records of a file of this name, with a blank line that has spaces in it."""
    records = [*(["text"] if name == "a.csv" else []), *texts]
    if name.endswith(".jsonl"):
        with_image = {"image": "x.png", "completion": "!"} if name == "image.jsonl" else {}
        role = "prompt" if with_image else "text"
        records = [json.dumps({role: t} | with_image, ensure_ascii=False) for t in texts]
    return [line.encode() for record in records for line in (record, " \t ")]


@pytest.mark.parametrize("reader", READERS)
def test_lines_end_in_the_same_places_and_bad_ones_are_named_by_every_reader(
    reader, folder, monkeypatch
):
    name, read = READERS[reader]
    Image.new("RGB", (4, 4)).save(folder / "x.png")
    lines = records_of(name, [ODD, "second", "third"])
    file = folder / name
    file.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(lines))
    assert read(file) == [ODD, "second", "third"]
    lines[-2] = lines[-2].replace(b"third", b"th\xffird")
    file.write_bytes(b"\n".join(lines))
    where = f"data: {file}:{len(lines) - 1}: not UTF-8 (byte 0xff)"
    with pytest.raises(DataError) as caught:
        read(file)
    assert str(caught.value).startswith(where)
    assert "\n" not in str(caught.value)
    # A line without an end is one line of error.
    monkeypatch.setattr("trainer.data.lines.LONGEST_LINE", 2**20)
    with file.open("wb") as stream:
        stream.truncate(2**21)
    with pytest.raises(DataError, match=r":1: the line is longer than 1 MiB; is the file text\?"):
        read(file)


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.txt"])
def test_text_and_hf_read_the_same_of_the_same_file(name, folder):
    texts = ["one\r\ntwo", " ", "three ", "a,b"]
    records = [{"text": each} for each in texts]
    file = folder / name
    if name == "a.json":
        file.write_text(json.dumps(records, indent=1))
    elif name == "a.jsonl":
        write_lines(file, records)
    else:
        file.write_bytes("\n \n".join(texts).encode())
    left = [each for each in texts if each.strip()]
    assert documents_of(text(file)) == hf_texts(hf(file)) == left
    packed = folder / f"{name}.gz"
    packed.write_bytes(gzip.compress(file.read_bytes()))
    assert documents_of(text(packed)) == hf_texts(hf(packed)) == left
    for data in (text(file), hf(file)):
        rows = [each.text for each in data_facts(data).describe_records(None)]
        assert any("1 without text left out" in (row or "") for row in rows) == (name != "a.txt")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_path_is_literal_whatever_characters_are_in_it(kind, folder):
    import datasets  # noqa: PLC0415 - seconds, of every process that collects tests
    import pyarrow as pa  # noqa: PLC0415
    from pyarrow.parquet import write_table  # noqa: PLC0415

    names = ["data1", "data[1]", "ab", "a?", "a*", "a::b", "x[1]/in", "x1/in", "~a#b", "__in__/a"]
    for name in names:
        path = folder / f"{name}.{kind}"
        path.parent.mkdir(exist_ok=True)
        if kind == "parquet":
            write_table(pa.table({"text": [name]}), pa.OSFile(str(path), "wb"))
        else:
            write_lines(path, [{"text": name}])
    for name in names:
        assert hf_texts(hf(folder / f"{name}.{kind}")) == [name]
    assert hf_texts(hf(folder / "x[1]")) == ["x[1]/in"]
    assert hf_texts(hf(folder / "__in__")) == ["__in__/a"]
    datasets.Dataset.from_dict({"text": ["saved"]}).save_to_disk(folder / "s[1]*?")
    assert hf_texts(hf(folder / "s[1]*?")) == ["saved"]


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_cells_are_what_is_written(separator, folder):
    odd = ["009999", "NA", "null", "None", "nan", "N/A", "1e3", "True", "-0", "a\r\nb", 'say "x"']
    for cells in (odd, ["007", "0010"]):
        lines = ['"{}"{}x'.format(cell.replace('"', '""'), separator) for cell in cells]
        content = "\n".join([f"text{separator}y", *lines])
        (folder / "a.csv").write_text(content, newline="")
        data = hf(folder / "a.csv")
        assert hf_texts(data) == cells
    assert data.name_of(1) == f"{folder}/a.csv:3"


def test_a_table_is_of_one_kind_whatever_stands_first(folder):
    cells = [*(f"word {i}" for i in range(150)), *(f"{i:06d}" for i in range(150))]
    (folder / "a.csv").write_text("\n".join(["text", *cells]))
    assert hf_texts(hf(folder / "a.csv")) == cells


@pytest.mark.parametrize(
    ("labels", "names", "numbers"),
    [
        (["NA", "None", "good", "null"], ["NA", "None", "good", "null"], [0, 1, 2, 3]),
        (["0", "10", "2", "1"], ["0", "1", "2", "10"], [0, 3, 2, 1]),
        (["0", "2", "1", "1"], None, [0, 2, 1, 1]),
        (["01", "10", "002", "1"], ["002", "01", "1", "10"], [1, 3, 0, 2]),
        (["0.5", "-1", "2e1", ".25"], None, [0.5, -1.0, 20.0, 0.25]),
    ],
)
def test_labels_of_a_table_are_numbers_where_all_are_and_else_words(labels, names, numbers, folder):
    rows = "".join(f"text,{label}\n" for label in labels)
    (folder / "a.csv").write_text(f"text,label\n{rows}")
    data = hf(folder / "a.csv", "sequence_classification")
    known = data.facts().label_names
    assert (known and [*known]) == names
    assert [data[i]["labels"].item() for i in range(len(data))] == numbers
    assert data.facts().num_classes == (1 if isinstance(numbers[0], float) else max(numbers) + 1)


def passed_over(data: Any) -> str:
    rows = data_facts(data).describe_records(None)
    (shown,) = [row.text for row in rows if "passed over" in (row.text or "")]
    return shown


def test_a_folder_passes_over_other_files_and_folders_of_runs_and_counts_both(folder):
    for run in ("outputs/day/1/.hydra/config.yaml", "outputs/day/2/.hydra/config.yaml"):
        (folder / run).parent.mkdir(parents=True)
        (folder / run).write_text("steps: 1")
    sweep = folder / "outputs/multirun/day/sweep"
    (sweep / "0/.hydra").mkdir(parents=True)
    for name in ("multirun.yaml", "sweep.csv", "0/train.log"):
        (sweep / name).write_text("text\n")
    for name in ("outputs/day/1/train.log", "outputs/day/2/a.csv", "outputs/day/1/a.txt"):
        (folder / name).touch()
    (folder / "a.txt").write_text("first")
    for name in ("cat/a.png", "dog/deep/b.png"):
        (folder / name).parent.mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(folder / name)
    np.arange(9, dtype=np.uint16).tofile(folder / "cat/a.bin")
    runs = "3 run folders"
    data = text(folder)
    assert documents_of(data) == ["first"]
    assert passed_over(data) == f"passed over: 1 .bin file, 2 .png files, {runs}"
    data = hf(folder)
    assert hf_texts(data) == ["first"]
    assert passed_over(data) == f"passed over: 1 .bin file, 2 .png files, {runs}"
    data = TokenWindows(str(folder), max_length=9)
    assert (len(data), passed_over(data)) == (1, f"passed over: 1 .txt file, 2 .png files, {runs}")
    images = ImageFolders(str(folder)).splits()["train"]
    assert images.label_names == ["cat", "dog"]
    assert passed_over(images) == f"passed over: 1 .bin file, {runs}"
    # One that is named itself is read.
    assert documents_of(text(sweep)) == ["text", "text"]


def test_what_takes_long_is_a_bar_of_its_records_on_a_terminal_and_else_a_line(monkeypatch, capsys):
    monkeypatch.setattr(files, "LONG_S", 0)
    for total in (3, 0):
        with files.progress("reading a.jsonl", total, "record") as advance:
            advance()
            advance()
    expected = ["train: reading a.jsonl, 3 records ...", "train: reading a.jsonl ..."]
    assert capsys.readouterr().err.splitlines() == expected
    for name, value in {"TERM": "xterm", "COLUMNS": "80"}.items():
        monkeypatch.setenv(name, value)
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as file, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", file)
        with files.progress("reading [a].jsonl", 3, "record") as advance:
            advance()
    read = b""
    with suppress(OSError):  # at its end
        while True:
            read += os.read(ours, 4096)
    os.close(ours)
    drawn = read.decode()
    assert "reading [a].jsonl" in drawn
    assert "━" in drawn
    assert "1 of 3 records" in drawn
