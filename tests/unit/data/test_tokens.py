"""Token files: windows, splits, dtypes, and files that cannot be right."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.core.errors import DataError
from trainer.data.tokens import TokenWindows


def write(path, tokens, dtype="<u2"):
    path.parent.mkdir(parents=True, exist_ok=True)
    np.asarray(tokens, dtype=dtype).tofile(path)
    return path


def windows_of(path, **more):
    dataset = TokenWindows(str(path), **{"max_length": 4, "holdout": 0.0} | more)
    return [dataset[i]["labels"].tolist() for i in range(len(dataset))]


def test_windows_follow_each_other_within_a_file_and_the_last_of_each_may_be_short(tmp_path):
    folder = tmp_path / "folder"
    write(folder / "b" / "0.bin", [7, 8, 9, 10, 11])
    write(folder / "a.bin", [1, 2, 3, 4])
    (folder / "meta.json").write_text("{}")
    assert windows_of(folder) == [[1, 2, 3, 4], [7, 8, 9, 10], [10, 11]]
    write(folder / "b" / "train.bin", range(10))
    write(folder / "val.bin", range(100, 106))
    named = [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]], [[100, 101, 102, 103], [103, 104, 105]]
    for split, windows in zip(("train", "held_out"), named, strict=True):
        assert windows_of(folder, holdout=0.5, split=split) == windows


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    max_length=st.integers(2, 12),
    holdout=st.floats(0, 0.9),
)
def test_both_splits_predict_every_token_but_a_files_first_once(
    tmp_path_factory, sizes, max_length, holdout
):
    folder = tmp_path_factory.mktemp("tokens")
    tokens = np.arange(sum(sizes))
    for number, part in enumerate(np.split(tokens, np.cumsum(sizes)[:-1])):
        write(folder / f"{number}.bin", part)
    predicted, begins = [], np.cumsum([0, *sizes[:-1]]).tolist()
    for split in ("train", "held_out"):
        dataset = TokenWindows(str(folder), split, max_length, holdout=holdout)
        samples = [sample["input_ids"] for sample in dataset]  # until an IndexError
        assert dataset.lengths.tolist() == [len(sample) for sample in samples]
        assert all(len(sample) <= max_length for sample in samples)
        predicted += [token for sample in samples for token in sample.tolist()[1:]]
    assert predicted == [token for token in tokens.tolist() if token not in begins]


def test_the_dtype_is_typed_or_that_of_the_suffix_and_a_wrong_guess_is_noticed(tmp_path):
    for name, dtype, typed in [
        ("data.bin", "<u2", "auto"),
        ("data.bin", "<u4", "uint32"),
        ("data.u32", "<u4", "auto"),
        ("data.uint32.bin", "<u4", "auto"),
        ("data.u32", "<u2", "uint16"),
    ]:
        file = write(tmp_path / name, [1, 2, 60_000], dtype)
        assert windows_of(file, dtype=typed) == [[1, 2, 60_000]]
    file = write(tmp_path / "data.bin", range(1, 100), "<u4")
    with pytest.raises(DataError, match=r"as if the tokens were uint32; set data\.dtype"):
        TokenWindows(str(file))
    assert len(windows_of(file, dtype="uint16", max_length=5)) == 50


def test_files_that_cannot_be_token_files_are_data_errors(tmp_path):
    (tmp_path / "odd.bin").write_bytes(b"123")
    (tmp_path / "empty.bin").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    np.save(tmp_path / "numpy.npy", np.arange(9))
    for name, fault in {
        "numpy.npy": "is a NumPy file",
        "odd.bin": "3 bytes are not a whole number of uint16 tokens",
        "empty.bin": "holds no tokens",
        "folder": "holds no .bin files",
    }.items():
        with pytest.raises(DataError, match=f"{name}.*{fault}"):
            TokenWindows(str(tmp_path / name))


def test_the_fingerprint_follows_tokens_and_settings(tmp_path):
    file = write(tmp_path / "data.bin", np.arange(50_000))

    def fingerprint(**more):
        return TokenWindows(str(file), **more).fingerprint

    prints = [fingerprint(), fingerprint(split="held_out"), fingerprint(max_length=8)]
    file.touch()
    assert fingerprint() == prints[0]
    write(file, np.arange(50_000)[::-1])
    prints.append(fingerprint())
    assert len(set(prints)) == 4
