"""Pairs with hard negatives, ids or scores take the step of a plain loop over all of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from scipy import stats
from torch import Tensor

from tests.lib.hf_toys import TEXTS, save_tokenizer, write_lines
from tests.lib.nightly import slow
from tests.lib.run_support import curve, go, state
from trainer.features.contrastive.pair_scores import CoSENT, CosineSimilarity
from trainer.objectives.text_output import TextOutput

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

EXACT, WRONG, COUNT, TEMPERATURE = 1e-10, 1e-4, 12, 0.1
SIZES = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 2, "max_position_embeddings": 64, "pad_token_id": 2}
DRY = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LINE = (
    "model=hf model.path=model model.task=embedding model.dtype=float64 model.pooling=mean data=hf "
    f"data.path=pairs.jsonl batch.global={COUNT} accum.micro=5 steps=1 scheduler=constant "
    "clip_norm=null optimizer=sgd optimizer.lr=1 optimizer.momentum=0"
)
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


def save(records: list[dict[str, Any]]) -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES, **DRY)
    transformers.AutoModel.from_config(config).save_pretrained("model")
    save_tokenizer(Path("model"), 300)
    write_lines(Path("pairs.jsonl"), records)


def embedded(model: torch.nn.Module, texts: list[str]) -> Tensor:
    tokenizer = transformers.AutoTokenizer.from_pretrained("model")
    given = tokenizer(texts, padding=True, return_tensors="pt")
    hidden = model(**{n: given[n] for n in ("input_ids", "attention_mask")}).last_hidden_state
    mask = given["attention_mask"][..., None]
    return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


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


def step_of(loss: Any, size: int = COUNT, **how: Any) -> tuple[float, dict[str, Tensor]]:
    """Compute loss and gradient; below the whole batch, the mean over parts of `size`."""
    model = transformers.AutoModel.from_pretrained("model", dtype=torch.float64).train()
    total = 0.0
    for start in range(0, COUNT, size):
        part = loss(model, range(start, start + size), **how) / COUNT
        part.backward()
        total += part.item()
    return total, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    largest = max(float(each.abs().max()) for each in expected.values())
    return max(float((found[n] - expected[n]).abs().max()) for n in expected) / largest


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
    "one way": (
        NEGATIVES,
        "objective.temperature=0.1 objective.symmetric=false",
        info_nce,
        ONE_WAY,
    ),
    "cosent": (SCORED, "objective=cosent objective.temperature=0.1", cosent, {}),
    "cosine": (SCORED, "objective=cosine", squares, {}),
}


@pytest.mark.parametrize("case", ["one way", slow("negatives"), "cosent", "cosine"])
def test_the_step_is_that_of_a_plain_loop_over_the_whole_batch(case, capfd):
    records, words, loss, how = CASES[case]
    save(records)
    before = transformers.AutoModel.from_pretrained("model", dtype=torch.float64).state_dict()
    objective = "" if "objective=" in words else "objective=contrastive"
    run = go(f"{LINE} data.holdout=0 {objective} {words}")
    shown = " ".join(capfd.readouterr().out.split())
    expected, gradient = step_of(loss, **how)
    after = state(run)
    found = {name: before[name] - after[f"model.{name}"] for name in gradient}
    assert curve(run, "loss") == pytest.approx([expected], rel=EXACT)
    assert error(found, gradient) <= EXACT
    if case == "cosine":
        assert "scores of 0 to 5 divided by 5" in shown
        return
    # The mean of parts, and what is masked as if it were a negative.
    wrong = [step_of(loss, 4, **how)]
    if loss is info_nce:
        wrong.append(step_of(loss, is_masked=False, **how))
        assert "0 to 2 hard negatives each" in shown
    for value, each in wrong:
        assert abs(value - expected) > WRONG
        assert error(each, gradient) > WRONG


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
