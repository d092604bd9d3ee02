"""The index on disk, and which samples are held out."""

import threading
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.core.errors import DataError
from trainer.core.urls import cache_folder
from trainer.data.index import cached_index
from trainer.data.split import held_out_count, held_out_mask

DOCUMENTS = [b"some text", b"", b"\x00\xff" * 9]
pytestmark = pytest.mark.usefixtures("cache")


def opened(documents=None, reader="key"):
    def build(add):
        assert documents is not None, "built again"
        for document in documents:
            add(document, document)
        return (), {}

    return cached_index("text", "settings", {}, build, reader=reader)


def contents(index):
    bounds = pairwise(index.offsets.tolist())
    return [index.blob[begin:end].tobytes() for begin, end in bounds]


def test_an_index_is_built_once_mapped_afterwards_and_replaced_under_another_key(cache):
    built, again = opened(DOCUMENTS), opened()
    assert contents(built) == contents(again) == DOCUMENTS
    assert built.digest == again.digest
    assert list(cache.iterdir()) == [again.path]
    newer = opened([b"newer"], "another")
    assert contents(built) == DOCUMENTS, "an open one stays"
    assert contents(newer) == [b"newer"]
    assert list(cache.iterdir()) == [newer.path]


def test_every_damaged_byte_cut_and_missing_file_is_noticed_and_built_again(caplog):
    index = opened(DOCUMENTS)
    for name in ("documents.bin", "offsets.bin", "groups.bin", "index.json"):
        file = index.path / name
        whole = file.read_bytes()
        damaged = [whole[:size] for size in (0, 5, len(whole) - 1)]
        if name != "index.json":
            flips = (bytes([byte ^ 0x10]) for byte in whole)
            damaged += [whole[:at] + flip + whole[at + 1 :] for at, flip in enumerate(flips)]
        for content in (*damaged, None):
            file.write_bytes(content or b"")
            if content is None:
                file.unlink()
            again = opened(DOCUMENTS)
            assert "rebuilding the index" in caplog.text
            assert (contents(again), again.digest) == (DOCUMENTS, index.digest)
            caplog.clear()


def test_builders_that_race_each_end_with_a_whole_index(cache):
    documents, results = [bytes([k]) * k for k in range(200)], []
    work = [lambda: results.append(contents(opened(documents)))] * 8
    threads = [threading.Thread(target=each) for each in work]
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
        cached_index("text", "settings", {}, fail)
    assert list(cache.iterdir()) == []


def test_the_cache_folder_follows_the_environment_and_must_be_writable(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRAIN_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(DataError, match=r"cannot write the index .*another folder in TRAIN_CACHE"):
        opened([b"text"])
    monkeypatch.delenv("TRAIN_CACHE")
    for name, folder in (("XDG_CACHE_HOME", "step-trainer"), ("HOME", ".cache/step-trainer")):
        monkeypatch.setenv(name, str(tmp_path))
        assert cache_folder() == tmp_path / folder
        monkeypatch.delenv(name)


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
