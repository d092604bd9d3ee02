"""The index on disk, and which samples are held out."""

import pickle
import threading
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.core.errors import DataError
from trainer.data.index import cache_folder, cached_index
from trainer.data.samples import held_out_count, held_out_mask


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("TRAIN_CACHE", str(folder))
    return folder


def build(documents):
    def builder(add):
        for document in documents:
            add(document, document)
        return {"num_skipped": 0, "skipped": []}

    return builder


def never(add):
    raise AssertionError("built again")


def contents(index):
    bounds = pairwise(index.offsets.tolist())
    return [index.blob[begin:end].tobytes() for begin, end in bounds]


def test_an_index_is_built_once_and_mapped_afterwards(cache):
    documents = [b"one", b"", b"\x00\xff" * 9]
    built = cached_index("name", "key", build(documents))
    opened = cached_index("name", "key", never)
    assert contents(built) == contents(opened) == documents
    assert built.digest == opened.digest
    assert list(cache.iterdir()) == [opened.path]


def test_another_key_replaces_the_index_and_not_open_ones(cache):
    old = cached_index("name", "old", build([b"old"]))
    new = cached_index("name", "new", build([b"newer"]))
    assert contents(old) == [b"old"]
    assert contents(new) == [b"newer"]
    assert list(cache.iterdir()) == [new.path]


def test_a_file_cut_short_or_missing_is_noticed_and_built_again(caplog):
    documents = [b"some text", b"more of it"]
    path = cached_index("name", "key", build(documents)).path
    for file in sorted(path.iterdir()):
        whole = file.read_bytes()
        for size in (0, 5, len(whole) - 1):
            file.write_bytes(whole[:size])
            assert contents(cached_index("name", "key", build(documents))) == documents
            assert "is built again" in caplog.text
            caplog.clear()
            assert contents(cached_index("name", "key", never)) == documents
        file.unlink()
        assert contents(cached_index("name", "key", build(documents))) == documents


def test_every_damaged_byte_of_documents_offsets_and_groups_is_noticed():
    documents = [b"some text", b"more of it"]
    index = cached_index("name", "key", build(documents))
    for name in ("documents.bin", "offsets.bin", "groups.bin"):
        file = index.path / name
        whole = file.read_bytes()
        for position in range(len(whole)):
            damaged = bytearray(whole)
            damaged[position] ^= 0x10
            file.write_bytes(damaged)
            again = cached_index("name", "key", build(documents))
            assert (contents(again), again.digest) == (documents, index.digest)


def test_builders_that_race_each_end_with_a_whole_index(cache):
    documents = [bytes([k]) * k for k in range(200)]
    results = []
    threads = [
        threading.Thread(
            target=lambda: results.append(contents(cached_index("name", "key", build(documents))))
        )
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [documents] * 8
    assert len(list(cache.iterdir())) == 1


def test_a_builder_that_fails_removes_what_it_wrote(cache):
    def fail(add):
        add(b"half", b"half")
        raise DataError("bad record")

    with pytest.raises(DataError, match="bad record"):
        cached_index("name", "key", fail)
    assert list(cache.iterdir()) == []


def test_a_cache_that_cannot_be_written_to_says_what_to_set(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("TRAIN_CACHE", str(blocked / "cache"))
    with pytest.raises(DataError, match=r"cannot write the index .*another folder in TRAIN_CACHE"):
        cached_index("name", "key", build([b"text"]))


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("TRAIN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "step-trainer"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "step-trainer"


def test_a_pickled_index_is_a_path_and_a_key():
    index = cached_index("big", "key", build([bytes(10**6)]))
    pickled = pickle.dumps(index)
    assert len(pickled) < 1000
    assert contents(pickle.loads(pickled)) == [bytes(10**6)]
    cached_index("big", "another", build([b"text"]))
    with pytest.raises(DataError, match=r"cannot be read .*; run again"):
        pickle.loads(pickled)


@given(
    keys=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=50),
    holdout=st.floats(0, 0.99),
    seed=st.integers(0, 2**40),
)
def test_the_share_is_exact_in_keys_and_samples_of_one_key_stay_together(keys, holdout, seed):
    doubled = np.array(keys + keys[::-1], dtype=np.uint64)
    mask = held_out_mask(doubled, holdout, seed)
    held_out, train = set(doubled[mask].tolist()), set(doubled[~mask].tolist())
    assert not held_out & train
    assert len(held_out) == held_out_count(len(set(keys)), holdout)
    assert (mask[::-1] == held_out_mask(doubled[::-1], holdout, seed)).all()


@given(count=st.integers(0, 1000), holdout=st.floats(0, 0.999))
def test_both_sides_of_a_split_hold_something_where_they_can(count, holdout):
    held_out = held_out_count(count, holdout)
    assert (held_out > 0) == (holdout > 0 and count > 1)
    assert held_out < max(count, 1)
    if 1 < held_out < count - 1:
        assert abs(held_out - count * holdout) <= 0.5
