"""Distillation: a sum over labels, whatever the cut, of what two models give."""

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.lib.hf_toys import TEXTS, save_job_files, save_tokenizer
from tests.lib.nightly import slow
from tests.lib.run_support import curve, go, on, overrides, shell
from trainer import train
from trainer.core.errors import ConfigError
from trainer.features.distill.distill import Distill
from trainer.models.bind import bind
from trainer.models.frozen import add_frozen

TEMPERATURE, ALPHA = 3.0, 0.7
SMALL = "model=gpt_tiny model.vocab_size=16 model.max_length=16 model.width=24"


class Net(nn.Module):
    def __init__(self, width: int, *, is_sequence: bool = True) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, width), nn.Linear(width, 7)
        self.drop, self.is_sequence = nn.Dropout(0.5), is_sequence

    def forward(self, input_ids):
        hidden = self.drop(self.embed(input_ids).cumsum(1))
        return self.head(hidden if self.is_sequence else hidden[:, -1])


def batch(length: int, seed: int, *, is_sequence: bool) -> dict[str, torch.Tensor]:
    ids = torch.randint(7, (3, length), generator=torch.Generator().manual_seed(seed))
    weight = torch.tensor([1.0, 0.5, 3.0])
    if not is_sequence:
        return {"input_ids": ids, "labels": ids[:, 0], "weight": weight}
    labels = ids.clone()
    labels[0, : length // 2] = -100
    return {"input_ids": ids, "labels": labels, "weight": weight}


def by_hand(student, teacher, micro_batches, *, is_sequence, soft=TEMPERATURE):
    """Add up the loss of each label in a loop, by PyTorch alone, and divide once by all weights."""
    loss, count = torch.zeros((), dtype=torch.float64), 0.0
    for fields in micro_batches:
        own, other = student(fields["input_ids"]), teacher(fields["input_ids"]).detach()
        for i, labels in enumerate(fields["labels"]):
            pairs = [(own[i], other[i], labels)]
            if is_sequence:
                pairs = [*zip(own[i][:-1], other[i][:-1], labels[1:], strict=True)]
            for mine, its, label in pairs:
                if label == -100:
                    continue
                p, q = (its / soft).softmax(0), (mine / soft).softmax(0)
                kl = (p * (p.log() - q.log())).sum()
                cross_entropy = -mine.softmax(0)[label].log()
                weight = fields["weight"][i]
                loss = loss + weight * (ALPHA * soft**2 * kl + (1 - ALPHA) * cross_entropy)
                count += weight
    return loss / count


@pytest.mark.parametrize("is_sequence", [True, False], ids=["tokens", "classes"])
def test_the_sum_over_ragged_micro_batches_is_the_loss_of_all_labels(is_sequence):
    torch.manual_seed(0)
    student, teacher = (Net(w, is_sequence=is_sequence).double() for w in (5, 9))
    objective = Distill(teacher="none", temperature=TEMPERATURE, alpha=ALPHA)
    micro_batches = [batch(n, n, is_sequence=is_sequence) for n in (2, 5, 9)]
    student.eval()
    expected = by_hand(student, teacher.eval(), micro_batches, is_sequence=is_sequence)
    own = list(student.parameters())
    wanted = torch.autograd.grad(expected, own)
    colder = by_hand(student, teacher, micro_batches, is_sequence=is_sequence, soft=1.0)
    teacher.train()
    add_frozen(student, lambda _: teacher, {}, torch.device("cpu"))
    divisor = sum(objective.weights(fields)["distillation"] for fields in micro_batches)
    loss, means = torch.zeros((), dtype=torch.float64), list[torch.Tensor]()
    for fields in micro_batches:
        sums = objective.sums(bind(student), fields)
        whole = sum(sums.losses.values())
        loss = loss + whole / divisor
        means.append(whole / objective.weights(fields)["distillation"])
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)
    found = torch.autograd.grad(loss, own)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    # Controls: the mean of means, and another temperature, are other losses.
    assert abs(colder - expected) > 1e-3
    if is_sequence:
        assert abs(torch.stack(means).mean() - expected) > 1e-3
    assert all(parameter.grad is None for parameter in teacher.parameters())
    # Metrics that are named later count, too.
    with torch.no_grad():
        named = objective.with_metrics(("f1",)).sums(bind(student), fields)
    assert named.statistics.keys() > objective.sums(bind(student), fields).statistics.keys()


LAYOUTS = ["", slow("parallel=fsdp parallel.ranks=2")]


@pytest.fixture
def teacher(own_folder: Path) -> Path:
    run = go(f"{SMALL} steps=3 model.num_layers=1 name=teacher")
    assert shell(f"export run={run.folder} export.to=exported") == 0
    return run.folder


@pytest.mark.parametrize("layout", LAYOUTS, ids=["one", "fsdp"])
def test_a_run_learns_from_a_run_or_its_export_and_goes_on(teacher, layout):
    line = f"{SMALL} objective=distill objective.alpha=1 {layout}"
    whole = go(f"{line} objective.teacher=teacher steps=4")
    by_export = go(f"{line} objective.teacher=exported steps=2 accum.micro=2")
    assert curve(by_export, "loss") == pytest.approx(curve(whole, "loss")[:2], rel=1e-5)
    again = on(by_export, "steps=4 resume_allow=[steps,scheduler]")
    assert again.result["step"] == 4
    assert curve(whole, "loss")[-1] < curve(whole, "loss")[0]
    assert shell(f"export run={whole.folder} export.to=small") == 0
    assert train(["evaluate", f"run={whole.folder}"]).result


@pytest.mark.slow
def test_verify_proves_the_step_and_a_teacher_of_other_tokens_is_one_line(teacher):
    line = f"{SMALL} objective=distill objective.teacher=teacher steps=2"
    assert train(["verify", *overrides(line)]).result["verdict"] == "exact"
    other = go("model=gpt_tiny model.vocab_size=20 model.max_length=16 model.width=24 steps=1")
    with pytest.raises(ConfigError, match=r"objective.teacher=.*: gives logits of shape .* 20\)"):
        go(f"{SMALL} objective=distill objective.teacher={other.folder} steps=1")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_teacher_of_other_classes_or_tokens_or_of_a_masked_model_is_one_line(own_folder):
    save_job_files("bert")
    line = "model=hf model.path=bert data=hf batch.global=8 steps=1 name={}"
    of_reviews = f"{line} model.task=sequence_classification data.path=reviews.csv"
    known = go(of_reviews.format("known"))
    assert shell(f"export run={known.folder} export.to=exported") == 0
    rows = Path("reviews.csv").read_text()
    Path("turned.csv").write_text(rows.replace(",good", ",worse"))
    save_tokenizer(Path("other"), texts=TEXTS[::2])
    for teacher in ("known", "exported"):
        learn = f"{of_reviews.format('x')} objective=distill objective.teacher={teacher}"
        with pytest.raises(ConfigError, match=r"classes are bad, good, and .* bad, worse; take"):
            go(f"{learn} data.path=turned.csv")
        with pytest.raises(ConfigError, match=rf"{teacher}: has other tokens; take a teacher"):
            go(f"{learn} tokenizer.path=other")
    go(learn)
    masked = f"{line.format('y')} data.path=corpus.jsonl objective=distill"
    with pytest.raises(ConfigError, match="distill: the model is made for masked_lm, which it"):
        go(f"{masked} objective.teacher=bert")
