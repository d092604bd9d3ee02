"""A contrastive loss over the whole global batch has the gradient of one piece for every cut."""

from functools import partial

import numpy as np
import pytest
import torch

from tests.lib.pair_toys import as_open_clip, by_hand, evaluated, gradient_of, whole
from tests.lib.ranks_work import error
from trainer.accumulate.two_pass import TwoPass
from trainer.core.world import World
from trainer.data.loader import Request
from trainer.features.contrastive import contrastive
from trainer.features.contrastive.contrastive import Contrastive
from trainer.objectives.base import Sums
from trainer.objectives.coupled import CoupledObjective
from trainer.plan.cuts import Budget, Fixed
from trainer.training.evaluation import CollectedRows

EXACT, WRONG = 1e-12, 1e-2
CUTS = [Fixed(micro=1), Fixed(micro=3), Budget(max_tokens=60)]
INFONCE, SIGLIP = Contrastive(), Contrastive(loss="siglip")
TWO = TwoPass(INFONCE)


@pytest.mark.parametrize("objective", [INFONCE, SIGLIP], ids=["infonce", "siglip"])
def test_equal_texts_and_images_are_no_negatives_of_each_other(objective, monkeypatch):
    monkeypatch.setattr(contrastive, "SCORE_ROWS", 4)  # of six queries two chunks
    torch.manual_seed(0)
    texts, images = torch.tensor([0, 1, 2, 0, 3, 4]), torch.tensor([0, 1, 2, 3, 3, 4])
    words, scenes = torch.randint(9, (5, 7)), torch.randn(5, 3, 2, 2)
    fields = {
        "input_ids": words[texts],
        "attention_mask": torch.ones(6, 7, dtype=torch.long),
        "pixel_values": scenes[images],
    }
    one, other = torch.randn(2, 5, 4, dtype=torch.float64).requires_grad_()
    given = {"query": one[texts], "document": other[images]}
    bias, scale = torch.tensor([[-1.0], [1.0]], dtype=torch.float64).requires_grad_()
    named = {"logit_bias": bias} if objective is SIGLIP else {}
    sums = objective.sums(lambda _: {**given, **named, "logit_scale": scale}, fields)

    query, document = (torch.nn.functional.normalize(each, dim=-1) for each in given.values())
    scores = query @ document.T * scale.exp() + sum(named.values(), torch.zeros(1))
    is_equal = (texts[:, None] == texts) | (images[:, None] == images)
    is_negative, own = ~is_equal, torch.eye(6, dtype=torch.bool)
    if objective is SIGLIP:
        losses = torch.nn.functional.softplus(torch.where(own, -scores, scores))
        plain, expected = losses.sum(), losses[own | is_negative].sum()
    else:
        kept = scores.masked_fill(~(own | is_negative), -torch.inf)
        plain, expected = (
            (x.logsumexp(0) + x.logsumexp(1)).sum() / 2 - scores.trace() for x in (scores, kept)
        )
    (found,) = sums.losses.values()
    assert found.item() == pytest.approx(expected.item(), rel=EXACT)
    assert abs((plain - expected).item()) > WRONG
    learned = [one, other, scale, *named.values()]
    ours, theirs = (torch.autograd.grad(x, learned, retain_graph=True) for x in (found, expected))
    for mine, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, right, rtol=EXACT, atol=EXACT)
    alike = {**named, "logit_scale": scale, "query": one[texts], "document": one[texts]}
    with torch.no_grad():
        same = objective.sums(lambda _: alike, fields)
    assert same.metrics["recall_at_1"] == len(texts)


def test_numbers_of_two_columns_are_no_ids_of_each_other():
    query, document = torch.randn(2, 6, 4, generator=torch.manual_seed(0)).double()
    given, ids = {"query": query, "document": document}, torch.arange(6)
    plain, apart, shared = (
        INFONCE.sums(lambda _: given, fields).losses["contrastive"].item()
        for fields in ({}, {"id": ids, "anchor_id": ids + 1}, {"id": ids // 2})
    )
    assert shared < plain == apart


def test_the_scale_counts_once_where_accumulation_in_open_clips_way_counts_it_each_time():
    cut = Fixed(micro=4)
    found, *_ = gradient_of(World(), cut, INFONCE, TWO)
    wrong = by_hand(as_open_clip, 1, cut, INFONCE)
    scale, scaled = found.pop("logit_scale"), wrong.pop("logit_scale")
    assert error(found, wrong) <= EXACT  # the towers
    np.testing.assert_allclose(4 * scale, scaled, rtol=EXACT)


@pytest.mark.parametrize(("mode", "sync"), [("ddp", "deferred"), ("fsdp", "immediate")])
def test_two_ranks_have_the_gradient_of_the_whole_batch_in_every_cut(mode, sync, ranks):
    for objective in (INFONCE, SIGLIP):
        how = {"bias": objective is SIGLIP, "dropout": 0.3}
        work = partial(gradient_of, mode=mode, sync=sync, **how)
        for cut in CUTS:
            same = by_hand(whole, 2, cut, objective, sync, **how)
            for found, *_ in ranks.run(2, work, cut, objective, TWO):
                assert error(found, same) <= EXACT, cut


def test_what_is_not_a_number_is_found_by_no_query():
    sides = torch.full((8, 4), float("nan")), torch.randn(8, 4)
    found = {"query": sides[0], "document": sides[1], "logit_scale": torch.zeros(8)}
    with torch.no_grad():
        metrics = Contrastive().sums_of_rows(found).metrics
    assert [float(metrics[f"recall_at_{k}"]) for k in (1, 5, 10)] == [0.0] * 3


def test_scores_are_no_tf32_forward_backward_or_evaluated():
    found = []

    class Spy(CoupledObjective):
        def sums_of_rows(self, rows):
            found.append(torch.get_float32_matmul_precision())
            total = rows["query"].sum()
            if total.requires_grad:
                total.register_hook(lambda _: found.append(torch.get_float32_matmul_precision()))
            return Sums(losses={"loss": total})

        def rows(self, model, fields):
            return {"query": torch.ones(1, 2)}

        def weights(self, fields):
            return {"loss": 1.0}

    torch.set_float32_matmul_precision("high")
    try:
        TWO.combine(Spy(), {"query": torch.ones(2, 2)}, {"loss": 2.0})
        collected = CollectedRows(Spy(), {0: 0})
        [*collected.noted(iter([Request((0,), 0, 1, False)]))]
        collected.add(None, {})
        collected.sums(World(), [{"loss": [1.0]}])
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert found == ["highest"] * 3


def test_an_evaluation_ranks_all_that_is_held_out_whatever_the_cut(ranks):
    figures, rows = evaluated(World(), 10**9, INFONCE)
    scores = rows["query"] @ rows["document"].T
    is_equal = (rows["digests"] == rows["digests"].T) & ~np.eye(len(scores), dtype=bool)
    assert is_equal.any()  # texts of one token
    scores[is_equal] = -np.inf
    better = (scores > scores.diagonal()[:, None]).sum(1)
    for k in (1, 5, 10):
        assert figures[f"recall_at_{k}"] == (better < k).mean()
    logits = torch.from_numpy(scores * figures["scale"])
    own = torch.arange(len(logits))
    both = [torch.nn.functional.cross_entropy(each, own) for each in (logits, logits.T)]
    assert figures["loss"] == pytest.approx(float(sum(both)) / 2, rel=EXACT)
    assert figures["scale"] == pytest.approx(np.exp(1.5), rel=EXACT)
    for cap in (1, 60):
        assert evaluated(World(), cap, INFONCE)[0] == pytest.approx(figures, rel=EXACT)
    some, _ = evaluated(World(), 60, INFONCE, 7)
    assert some["recall_at_10"] == 1
    for mine, _ in ranks.run(2, evaluated, 60, INFONCE):
        assert mine == pytest.approx(figures, rel=EXACT)
    for mine, _ in ranks.run(2, evaluated, 10**9, INFONCE, 1):  # one rank has nothing
        assert mine["recall_at_1"] == 1
