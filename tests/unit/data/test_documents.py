"""Documents, their index on disk, and the two data sets of texts."""

import math
import warnings
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from tests.lib.support import documents_of
from trainer.core.errors import DataError
from trainer.data.documents import BOS, EOS
from trainer.features.stdlib.stdlib import StdlibText

pytestmark = pytest.mark.usefixtures("cache")


MODULES = {
    "alpha.py": "def a():\n    return 1\n\n\nX = 1\n\n\nclass B:\n    def method(self): ...\n",
    "beta.py": "@decorated\n@twice(\n    1)\nasync def b():\n    return 'ä€'\n",
    "deep/gamma.py": "if X:\n    def hidden(): ...\ndef g(): return 1 ; x = 2\n",
    "deep/delta.py": "".join(f"def f{k}():\n    return {'x' * k!r}\n" for k in range(20)),
    "empty.py": "",
    "test/test_alpha.py": "def test(): ...\n",
    "idlelib/idle_test/test_b.py": "def test(): ...\n",
    "site-packages/other.py": "def other(): ...\n",
}


@pytest.fixture
def library(tmp_path):
    root = tmp_path / "library"
    for name, source in MODULES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    (root / "broken.py").write_text("def broken(:\n")
    (root / "undecodable.py").write_bytes(b"def a():\n    '\xff'\n")
    (root / "null.py").write_bytes(b"def a(): ...\n\0")
    (root / "dangling.py").symlink_to(tmp_path / "nowhere.py")
    return root


def test_documents_are_functions_and_classes_of_files_that_parse_and_others_are_counted(library):
    (library / "odd.py").write_text("'\\d'\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        both = [StdlibText(side, 10_000, 0.3, root=str(library)) for side in ("train", "held_out")]
    assert {text for dataset in both for text in documents_of(dataset)} == {
        "def a():\n    return 1",
        "class B:\n    def method(self): ...",
        "@decorated\n@twice(\n    1)\nasync def b():\n    return 'ä€'",
        "def g(): return 1 ; x = 2",
        *(f"def f{k}():\n    return {'x' * k!r}" for k in range(20)),
    }
    assert both[0].facts().num_skipped == 3
    reasons = [reason.split(":")[0] for reason in both[0].facts().skipped]
    assert reasons == ["broken.py", "null.py", "undecodable.py"]
    with pytest.raises(DataError, match="no Python source below"):
        StdlibText(root=str(library / "nowhere"))


@pytest.mark.parametrize("max_length", [2, 31])
def test_tokens_are_bos_bytes_eos_cut_or_in_chunks_that_predict_each_once(library, max_length):
    settings = {"holdout": 0.0, "root": str(library)}
    whole = StdlibText("train", 10_000, **settings)
    cut = StdlibText("train", max_length, overlong="cut", **settings)
    for i, text in enumerate(documents_of(whole)):
        expected = [BOS, *text.encode(), EOS]
        assert whole[i]["input_ids"].tolist() == expected
        assert cut[i]["input_ids"].tolist() == cut[i]["labels"].tolist() == expected[:max_length]
        assert cut.facts().lengths[i] == len(expected[:max_length])
    chunked = StdlibText("train", max_length, **settings)
    left_out = np.maximum(whole.facts().lengths - max_length, 0).sum()
    assert (cut.facts().num_cut, chunked.facts().num_cut) == (left_out, 0)
    samples, last = [sample["input_ids"].tolist() for sample in chunked], None
    for ids in samples:
        assert ids[0] == (BOS if last in (None, EOS) else last), "the context is the token before"
        last = ids[-1]
    # What the objective's shift predicts, of the chunks and of the whole documents.
    predicted = [token for ids in samples for token in ids[1:]]
    assert predicted == [t for sample in whole for t in sample["input_ids"].tolist()[1:]]
    lengths = [len(ids) for ids in samples]
    assert chunked.facts().lengths.tolist() == lengths
    assert max(lengths) <= max_length
    assert min(lengths) >= 2, "one token predicts nothing"


def test_longer_documents_are_dropped_and_counted_where_that_is_asked(library):
    settings = {"holdout": 0.3, "root": str(library)}
    whole = StdlibText("train", 10_000, **settings)
    dropped = StdlibText("train", 40, overlong="drop", **settings)
    short = [text for text in documents_of(whole) if len(text.encode()) + 2 <= 40]
    assert documents_of(dropped) == short
    num_tokens = sum(len(sample["input_ids"]) for sample in dropped)
    assert dropped.facts().num_cut + num_tokens == whole.facts().lengths.sum()
    with pytest.raises(DataError, match=r"data\.overlong=drop: every document is longer"):
        StdlibText("train", 3, overlong="drop", root=str(library))


def test_no_module_and_no_chunk_is_on_both_sides_and_no_document_is_lost(library):
    for seed in range(5):
        sides = [StdlibText(s, 16, 0.4, seed, root=str(library)) for s in ("train", "held_out")]
        whole = [StdlibText(s, 10_000, 0.4, seed, root=str(library)) for s in ("train", "held_out")]
        assert sum(map(len, whole)) == 24
        assert len(whole[1]) > 0
        # All the documents of one module begin in the same way.
        of_delta = [any(text[:5] == "def f" for text in documents_of(side)) for side in whole]
        assert sum(of_delta) == 1
        for chunked, side in zip(sides, whole, strict=True):
            assert "".join(documents_of(chunked)) == "".join(documents_of(side))
        ids = np.concatenate([side.original_ids for side in sides])
        everything = StdlibText("train", 16, 0.0, root=str(library))
        assert sorted(ids) == list(range(len(everything)))
        for side in sides:
            for i, own in enumerate(side.original_ids):
                assert side[i]["input_ids"].equal(everything[own]["input_ids"])


def test_the_entropies_are_those_of_a_count_by_hand(library, monkeypatch):
    monkeypatch.setattr("trainer.data.documents._BLOCK_TOKENS", 50)
    pairs, every = {}, 1
    for split in ("train", "held_out"):
        samples = [s["input_ids"].tolist() for s in StdlibText(split, 8, 0.4, root=str(library))]
        pairs[split] = Counter(pair for ids in samples[::every] for pair in pairwise(ids))
        every = 2  # of those that are held out
    after, seen = Counter(), Counter()
    for (first, second), count in pairs["train"].items():
        after[second] += count
        seen[first] += count
    unigram = bigram = 0.0
    for (first, second), count in pairs["held_out"].items():
        unigram -= count * math.log((after[second] + 1) / (after.total() + 258))
        bigram -= count * math.log((pairs["train"][first, second] + 1) / (seen[first] + 258))
    data = StdlibText("train", 8, 0.4, root=str(library))
    entropies = data.byte_entropies(np.arange(0, len(samples), 2))
    assert entropies.unigram == pytest.approx(unigram / pairs["held_out"].total(), rel=1e-12)
    assert entropies.bigram == pytest.approx(bigram / pairs["held_out"].total(), rel=1e-12)


def test_the_fingerprint_follows_every_setting_and_no_place_of_the_cache(library, monkeypatch):
    def fingerprint(**settings):
        return StdlibText(root=str(library), **settings).facts().fingerprint()

    first = fingerprint()
    settings = {"split": "held_out", "max_length": 64, "holdout": 0.1, "seed": 1, "overlong": "cut"}
    others = {fingerprint(**{name: value}) for name, value in settings.items()}
    assert len(others | {first}) == 6
    monkeypatch.setenv("TRAIN_CACHE", str(library / "another"))
    assert fingerprint() == first
