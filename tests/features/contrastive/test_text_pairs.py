"""One encoder for both texts of a pair takes the step of a plain loop over the whole batch."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from tests.lib.hf_toys import TEXTS
from tests.lib.nightly import nightly
from tests.lib.run_support import curve, entries, go, overrides, shell, state
from tests.lib.text_pair_toys import LINE, embedded, error, loaded, save, step_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

EXACT, WRONG, NUM_PAIRS, SCALE = 1e-10, 1e-3, 16, 20.0
LINE += f" batch.global={NUM_PAIRS}"
QUERIES = TEXTS[:NUM_PAIRS]
PASSAGES = [" ".join(TEXTS[: 1 + i % 4]) for i in range(NUM_PAIRS)]
"""Of four texts, the first shorter than most queries and the others longer."""
PAIRS = [
    {"query": query, "passage": passage, "note": "a"}
    for query, passage in zip(QUERIES, PASSAGES, strict=True)
]


def info_nce(
    model: torch.nn.Module, samples: range, *, pooling: str, leaves_out: bool = True
) -> Tensor:
    """Sum InfoNCE in both directions; it `leaves_out` equal passages as negatives, or does not."""
    queries, passages = ([texts[i] for i in samples] for texts in (QUERIES, PASSAGES))
    one, other = (embedded(model, texts, pooling) for texts in (queries, passages))
    scores, own = SCALE * one @ other.T, torch.arange(len(samples))
    if leaves_out:
        is_equal = torch.tensor([[a == b for a in passages] for b in passages])
        is_other = ~torch.eye(len(samples), dtype=torch.bool)
        scores = scores.masked_fill(is_equal & is_other, -torch.inf)
    both = [F.cross_entropy(each, own, reduction="sum") for each in (scores, scores.T)]
    return (both[0] + both[1]) / 2


@pytest.mark.parametrize(
    ("kind", "pooling", "cut"),
    [
        ("Bert", "mean", "accum.micro=3"),
        nightly("Bert", "mean", "accum.micro=3 parallel.ranks=2"),
        nightly("Bert", "cls", "accum.micro=5"),
        nightly("Llama", "last", "accum.micro=5"),
    ],
)
def test_the_step_is_that_of_a_loop_over_the_whole_batch_without_equal_passages_as_negatives(
    kind, pooling, cut, capfd, monkeypatch
):
    def norm(self, x: Tensor) -> Tensor:
        return self.weight * x * (x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()

    # Its own rounds to fp32, which hides what is left of a sum.
    monkeypatch.setattr(transformers.models.llama.modeling_llama.LlamaRMSNorm, "forward", norm)
    save(PAIRS, kind)
    before = loaded().state_dict()
    run = go(f"{LINE} data.holdout=0 model.pooling={pooling} {cut}")
    shown = " ".join(capfd.readouterr().out.split())
    assert f"contrastive, as the model is made for embedding, {pooling} pooling" in shown
    assert "pair (anchor: query, positive: passage), 1 column not read" in shown
    loss, expected = step_of(info_nce, NUM_PAIRS, pooling=pooling)
    after = state(run)
    found = {name: before[name] - after[f"model.{name}"] for name in expected}
    assert curve(run, "loss") == pytest.approx([loss], rel=EXACT)
    assert error(found, expected) <= EXACT
    # What a mean of micro-batches computes, and with equal passages as negatives.
    for wrong in (
        step_of(info_nce, NUM_PAIRS, 4, pooling=pooling),
        step_of(info_nce, NUM_PAIRS, pooling=pooling, leaves_out=False),
    ):
        assert abs(wrong[0] - loss) > WRONG
        assert error(wrong[1], expected) > WRONG
    other_way = {"mean": "cls", "cls": "last", "last": "mean"}[pooling]
    assert error(step_of(info_nce, NUM_PAIRS, pooling=other_way)[1], expected) > WRONG


@pytest.mark.slow
def test_a_run_is_proved_evaluated_and_exported(capsys):
    save(PAIRS)
    Path("model/1_Pooling").mkdir()
    pooling = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    Path("model/1_Pooling/config.json").write_text(json.dumps(pooling))
    line = f"{LINE} accum.micro=3 data.holdout=0.25 batch.global=6 eval.every=1"
    assert shell(f"verify {' '.join(overrides(line))}") == 0
    run = go(line)
    assert "cls pooling" in capsys.readouterr().out
    (last,) = [each for each in entries(run) if "eval_loss" in each]
    assert 0 <= last["eval_recall_at_1"] <= last["eval_recall_at_10"] == 1.0
    assert shell(f"export run={run.folder} export.to=out") == 0
    assert 'model = SentenceTransformer("out")' in capsys.readouterr().out
    written = json.loads(Path("out/1_Pooling/config.json").read_text())
    assert [name for name, value in written.items() if value is True] == ["pooling_mode_cls_token"]
    parts = [each["path"] for each in json.loads(Path("out/modules.json").read_text())]
    assert parts == ["", "1_Pooling", "2_Normalize"]
    loaded = transformers.AutoModel.from_pretrained("out", dtype=torch.float64)
    trained = state(run)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, trained[f"model.{name}"]), name
