"""Pairs with hard negatives, ids or scores take the step of a plain loop over all of them."""

from pathlib import Path

import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.lib.hf_toys import TEXTS, write_lines
from tests.lib.nightly import slow
from tests.lib.run_support import curve, go, shell, state
from tests.lib.text_pair_toys import LINE, embedded, error, loaded, save, step_of
from trainer.features.contrastive.pair_scores import CoSENT, CosineSimilarity
from trainer.objectives.text_output import TextOutput

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

EXACT, WRONG, COUNT, TEMPERATURE = 1e-10, 1e-4, 12, 0.1
LINE += f" model.pooling=mean batch.global={COUNT} accum.micro=5"
ANCHORS = [*TEXTS[: COUNT - 1], TEXTS[0]]
"""The first and the last are equal."""
POSITIVES = [*TEXTS[20 : 20 + COUNT - 2], TEXTS[20], ANCHORS[3]]
"""That of the first is that of the last but one, too; the last one is the fourth anchor."""
IDS = [*range(COUNT - 6), 0, *range(COUNT, COUNT + 5)]
SCORES = [(3 * i) % 7 / 8 for i in range(COUNT - 1)] + [1.0]
"""Without rounding in the fp32 in which data have them."""


def negatives_of(i: int) -> list[str]:
    """Two, one or none; some are positives of their own sample, or of one with its anchor."""
    if i % 4 == 3:
        return []
    return [[TEXTS[40 + i]], [TEXTS[41], TEXTS[20]], [POSITIVES[i], ANCHORS[i]]][i % 3]


def is_equal(i: int, j: int) -> bool:
    same = {ANCHORS[i] == ANCHORS[j], POSITIVES[i] == POSITIVES[j], IDS[i] == IDS[j]}
    return True in same or POSITIVES[j] == ANCHORS[i]


def info_nce(
    model: torch.nn.Module, samples: range, *, is_masked: bool = True, is_symmetric: bool = True
) -> Tensor:
    """Sum over samples, one by one, what is a negative of each."""
    query = embedded(model, [ANCHORS[i] for i in samples])
    document = embedded(model, [POSITIVES[i] for i in samples])
    texts = sorted({text for i in samples for text in negatives_of(i)})
    hard = dict(zip(texts, embedded(model, texts), strict=True))
    total = query.new_zeros(())
    for a, i in enumerate(samples):
        forward, backward = [query[a] @ document[a]], [query[a] @ document[a]]
        known = {POSITIVES[j] for j in samples if j == i or is_equal(i, j)} | {ANCHORS[i]}
        for b, j in enumerate(samples):
            if j != i and not (is_masked and is_equal(i, j)):
                forward.append(query[a] @ document[b])
            if j != i and not (is_masked and is_equal(j, i)):
                backward.append(query[b] @ document[a])
            for text in negatives_of(j):
                if not is_masked or text not in known | {POSITIVES[j]}:
                    forward.append(query[a] @ hard[text])
        each = [torch.stack(c).div(TEMPERATURE).logsumexp(0) for c in (forward, backward)]
        mean = sum(each) / 2 if is_symmetric else each[0]
        total = total + mean - forward[0] / TEMPERATURE
    return total


def cosines(model: torch.nn.Module, samples: range) -> Tensor:
    sides = [[texts[i] for i in samples] for texts in (ANCHORS, POSITIVES)]
    one, other = (embedded(model, texts) for texts in sides)
    return (one * other).sum(1)


def cosent(model: torch.nn.Module, samples: range) -> Tensor:
    found = cosines(model, samples)
    gaps = [
        (found[a] - found[b]) / TEMPERATURE
        for a, i in enumerate(samples)
        for b, j in enumerate(samples)
        if SCORES[i] < SCORES[j]
    ]
    return torch.stack(gaps).exp().sum().log1p() * len(samples)


def squares(model: torch.nn.Module, samples: range) -> Tensor:
    wanted = torch.tensor([SCORES[i] for i in samples], dtype=torch.float64)
    return (cosines(model, samples) - wanted).square().sum()


class LargestTensor(TorchDispatchMode):
    """Notes how many numbers the largest result has."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, tuple) else (found,):
            self.numel = max(self.numel, each.numel() if isinstance(each, Tensor) else 0)
        return found


NEGATIVES = [
    {"id": str(IDS[i]), "anchor": ANCHORS[i], "positive": POSITIVES[i]}
    | {f"negative_{k}": text for k, text in enumerate(negatives_of(i))}
    for i in range(COUNT)
]
SCORED = [
    {"sentence1": ANCHORS[i], "sentence2": POSITIVES[i], "score": str(SCORES[i] * 5)}
    for i in range(COUNT)
]
BOTH, ONE_WAY = "objective.temperature=0.1", {"is_symmetric": False}
CASES = {
    "negatives": (NEGATIVES, BOTH, info_nce, {}),
    "one way": (NEGATIVES, f"{BOTH} objective.symmetric=false", info_nce, ONE_WAY),
    "cosent": (SCORED, f"objective=cosent {BOTH}", cosent, {}),
    "cosine": (SCORED, "objective=cosine", squares, {}),
}


@pytest.mark.parametrize("case", ["one way", slow("negatives"), "cosent", "cosine"])
def test_the_step_is_that_of_a_plain_loop_over_the_whole_batch(case, capfd):
    records, words, loss, how = CASES[case]
    save(records, num_layers=1)
    before = loaded().state_dict()
    objective = "" if "objective=" in words else "objective=contrastive"
    run = go(f"{LINE} data.holdout=0 {objective} {words}")
    shown = " ".join(capfd.readouterr().out.split())
    expected, gradient = step_of(loss, COUNT, **how)
    after = state(run)
    found = {name: before[name] - after[f"model.{name}"] for name in gradient}
    assert curve(run, "loss") == pytest.approx([expected], rel=EXACT)
    assert error(found, gradient) <= EXACT
    if case == "cosine":
        assert "scores of 0 to 5 divided by 5" in shown
        return
    # The mean of parts, and what is masked as if it were a negative.
    wrong = [step_of(loss, COUNT, 4, **how)]
    if loss is info_nce:
        wrong.append(step_of(loss, COUNT, is_masked=False, **how))
        assert "0 to 2 hard negatives each" in shown
    for value, each in wrong:
        assert abs(value - expected) > WRONG
        assert error(each, gradient) > WRONG


def test_other_data_of_a_run_have_its_scale_and_may_choose_its_best_checkpoint(capfd):
    save(SCORED, num_layers=1)
    halves = [{**each, "score": float(each["score"]) / 5} for each in SCORED]
    write_lines(Path("other.jsonl"), halves)
    line = f"{LINE} data.holdout=0 'eval.sets={{other:{{path:other.jsonl}}}}'"
    # The objective follows from the data, and so do its metrics.
    line += " checkpoint.best=eval_other_pearson"
    run = go(line)
    write_lines(Path("pairs.jsonl"), halves)
    capfd.readouterr()
    assert shell(f"plan resume={run.folder} resume_allow=[data,steps] {line} steps=2") == 0
    shown = " ".join(capfd.readouterr().out.split())
    assert shown.count("scores of 0 to 1 divided by 5") == 2


def test_pairs_are_ranked_without_a_matrix_of_all_of_them():
    largest = LargestTensor()
    with largest:
        CoSENT().loss_sum(torch.rand(500), torch.rand(500))
    assert largest.numel <= 501


def test_correlations_are_those_of_scipy_with_ties_too():
    torch.manual_seed(0)
    rows = {"cosine": torch.randn(50).round(decimals=1).double(), "score": torch.rand(50).round()}
    with torch.no_grad():
        metrics = CoSENT().sums_of_rows(rows).metrics
    given = [each.numpy() for each in rows.values()]
    assert float(metrics["spearman"]) / 50 == pytest.approx(stats.spearmanr(*given)[0], rel=EXACT)
    assert float(metrics["pearson"]) / 50 == pytest.approx(stats.pearsonr(*given)[0], rel=EXACT)


def test_a_pair_has_a_cosine_in_predictions_and_a_text_alone_its_embedding():
    sides = {"query": torch.tensor([[3.0, 0.0]]), "document": torch.tensor([[1.0, 1.0]])}
    text = TextOutput()
    (pair,) = CoSENT().predict(lambda _: sides, {}, text)
    assert pair["prediction"] == pytest.approx(0.5**0.5)
    (alone,) = CoSENT().predict(lambda _: {"query": sides["query"]}, {}, text)
    assert alone["prediction"] == [1.0, 0.0]
    rows = CosineSimilarity().rows(lambda _: sides, {"score": torch.tensor([0.5])})
    assert CosineSimilarity().row_predictions(rows) == [(0.5, pytest.approx(0.5**0.5))]
