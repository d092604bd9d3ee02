"""How much of each source is in an epoch of a mixture, and which samples."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.lib.hf_toys import write_lines
from tests.lib.support import documents_of
from trainer.core.errors import ConfigError, DataError
from trainer.core.rows import RunFacts
from trainer.data.joined import MixtureSource
from trainer.data.split import split_by_seed
from trainer.data.text import Text
from trainer.data.view import DataView
from trainer.features.mixture.mixture import Mixture, MixturePart, counts_by_weight

SIZES = st.dictionaries(st.sampled_from("abcd"), st.integers(1, 500), min_size=1)


@given(sizes=SIZES, data=st.data(), stopping=st.sampled_from(["first", "all"]))
def test_counts_are_the_nearest_to_the_weights_and_end_where_a_source_does(sizes, data, stopping):
    weights = {n: Fraction(data.draw(st.integers(1, 30)), 7) for n in sizes}
    counts = counts_by_weight(sizes, weights, f"{stopping}_exhausted")
    length, total = sum(counts.values()), sum(weights.values())
    for name, count in counts.items():
        assert abs(count - length * weights[name] / total) < 1
        assert count <= sizes[name] if stopping == "first" else count >= sizes[name]
    # One sample more, or less, would break that.
    step = 1 if stopping == "first" else -1
    shares = [(length + step) * weights[name] / total - size for name, size in sizes.items()]
    assert max(shares) > 0 if stopping == "first" else min(shares) < 0


def test_what_is_left_goes_to_the_largest_remainders():
    weights = {"a": Fraction(2), "b": Fraction(2), "c": Fraction(3)}
    counts = counts_by_weight({"a": 9, "b": 3, "c": 9}, weights, "first_exhausted")
    assert counts == {"a": 3, "b": 3, "c": 4}


class Rows:
    """Samples that hold their number; one of them is torn."""

    draws_randomness, answer_ends = False, (7,)

    def __init__(self, first: int, count: int) -> None:
        self.first, self.lengths = first, np.arange(count) % 5 + 1

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        if self.first + i == 13:
            raise OSError("torn")
        return {"input_ids": torch.full((int(self.lengths[i]),), self.first + i)}


def mixed(stopping: str = "first_exhausted", weight: float = 1) -> dict[str, MixturePart]:
    """Ten and thirty samples, of which a share is held out."""
    sources = {}
    for name, first, count, own in (("a", 0, 10, 1), ("b", 100, 30, weight)):
        train, held_out = (
            split_by_seed(Rows(first, count), s, 0.2, 0) for s in ("train", "held_out")
        )
        sources[name] = MixtureSource(train=train, held_out=held_out, weight=own)
    return Mixture(sources, stopping).splits()


def test_answers_of_a_mixture_end_where_those_of_its_sources_do():
    for part in mixed().values():
        assert part.facts().answer_ends == (7,)


def numbers(part: MixturePart) -> list[int]:
    view = DataView(part)
    return [int(view.read(i, seed=0, epoch=0)["input_ids"][0]) for i in range(len(part))]


@pytest.mark.parametrize("stopping", ["first_exhausted", "all_exhausted"])
def test_a_source_begins_anew_or_gives_samples_at_even_distances(stopping):
    parts = mixed(stopping)
    train, held_out = numbers(parts["train"]), numbers(parts["held_out"])
    assert len(set(held_out)) == len(held_out) == 2 + 6
    assert not {*train} & {*held_out}
    a, b = ([n for n in train if (n >= 100) == is_b] for is_b in (False, True))
    view = DataView(parts["train"])
    assert [*map(view.source_of, range(len(train)))] == ["a"] * len(a) + ["b"] * len(b)
    if stopping == "all_exhausted":
        assert (len(set(a)), len(a), len(set(b)), len(b)) == (8, 24, 24, 24)
    else:
        assert (len(set(a)), len(a), len(set(b)), len(b)) == (8, 8, 8, 8)
        gaps = np.diff(b)
        assert 3 <= gaps.min() <= gaps.max() <= 6, "even, but for what is held out"
    assert [*map(len, view.sources.values())] == [len(a), len(b)]
    lengths = [len(view.read(i, seed=0, epoch=0)["input_ids"]) for i in range(len(view))]
    assert view.lengths[:].tolist() == lengths


def test_a_sample_is_named_by_its_source_and_a_source_without_samples_is_refused():
    source = MixtureSource(train=DataView(Rows(11, 4)), held_out=None, weight=1)
    part = DataView(Mixture({"a": source}).splits()["train"])
    with pytest.raises(DataError, match=r"^data: sample 2 of Rows \(data\.sources\.a\): .*torn"):
        part.read(2, seed=0, epoch=0)
    with pytest.raises(ConfigError, match=r"^data\.sources\.b\.weight=0\.001: none of its samp"):
        mixed(weight=0.001)


def test_a_text_that_one_source_holds_out_is_trained_on_in_no_other(tmp_path, cache):
    texts = [f"text {i}" for i in range(60)]
    sources = {}
    for name, own in (("a", texts[::2]), ("b", texts)):
        write_lines(tmp_path / f"{name}.jsonl", [{"text": text} for text in own])
        sides = Text(str(tmp_path / f"{name}.jsonl"), holdout=0.2).splits()
        views = {side: DataView(data) for side, data in sides.items()}
        sources[name] = MixtureSource(**views, weight=1)
    alone = {name: {*documents_of(source.train.dataset)} for name, source in sources.items()}
    parts = Mixture(sources, "all_exhausted").splits()
    held_out = {*documents_of(parts["held_out"])}
    lost = {name: len(found & held_out) for name, found in alone.items()}
    assert sum(lost.values()) > 0, "shares of sources of other sizes part a text"
    trained = DataView(parts["train"])
    assert {*documents_of([trained.read(i, seed=0, epoch=0) for i in range(len(trained))])} == (
        alone["a"] | alone["b"]
    ) - held_out
    facts = RunFacts(total_steps=1, world_size=1, noun="sample")
    shown = [row.text or "" for row in parts["train"].facts().describe_records(facts)]
    for name, count in lost.items():
        (row,) = [each for each in shown if each.startswith(f"{name}: ")]
        assert row.endswith(f"{count} held out elsewhere") == bool(count)
    again = Mixture(sources, "all_exhausted").splits()["train"]
    assert again.facts().fingerprint() == parts["train"].facts().fingerprint()
