"""A typed command takes transformers' own steps: their loss, gradient and weights, for every head.

The other side is a loop by hand: the class of transformers, called once with all samples of a step
and their labels, `loss.backward()`, and PyTorch's AdamW. No objective is typed, and the run cuts
its steps into ragged micro-batches.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from tests.lib.cli_support import prepared
from tests.lib.heads import TINY
from tests.lib.hf_toys import TEXTS, save_tokenizer, write_lines
from tests.lib.nightly import nightly, slow
from tests.lib.run_support import curve, go, overrides, shell, state
from trainer.assemble.build import assemble
from trainer.core.world import World

pytestmark = [
    pytest.mark.usefixtures("own_folder"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

EXACT = {"float64": 1e-10, "float32": 2e-5}
STEPS, NUM_IDS = 3, 300
LABELS = {"num_labels": 3}
LINE = (
    "model=hf model.path=model data=hf data.path=data.jsonl data.holdout=0 batch.global=6 "
    "accum.micro=4 accum.packed=false "
    f"steps={STEPS} optimizer.lr=1e-3 optimizer.weight_decay=0.1 optimizer.betas=[0.9,0.999] "
    "scheduler=constant clip_norm=0.5"
)

WORDS = [text.split() for text in TEXTS]
RECORDS: Mapping[str, Callable[[int], dict[str, Any]]] = {
    "text": lambda i: {"text": TEXTS[i]},
    "target": lambda i: {"source": TEXTS[i], "target": TEXTS[i + 1]},
    "class": lambda i: {"text": TEXTS[i], "label": "abc"[i % 3]},
    "pair": lambda i: {"premise": TEXTS[i], "hypothesis": TEXTS[i + 1], "label": i % 3},
    "number": lambda i: {"text": TEXTS[i], "label": i / 7 + 0.5},
    "tags": lambda i: {"tokens": WORDS[i], "tags": ["xyz"[len(word) % 3] for word in WORDS[i]]},
    "span": lambda i: {
        "question": "what is the loss",
        "context": TEXTS[i],
        "answers": {"text": [WORDS[i][-1]], "answer_start": [TEXTS[i].rindex(WORDS[i][-1])]},
    },
    "choice": lambda i: {
        **{"sent1": TEXTS[i], "sent2": "we", "label": i % 4},
        **{f"ending{k}": TEXTS[i + k] for k in range(4)},
    },
}


@dataclass(frozen=True)
class Job:
    """A class of transformers by its prefix, its head, and the records that it learns from."""

    prefix: str
    head: str
    records: str
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.prefix}{self.head}"

    def save(self) -> None:
        """Write the model's folder, with a tokenizer in it, and the file of records."""
        torch.manual_seed(0)
        ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "decoder_start_token_id": 2}
        config = getattr(transformers, f"{self.prefix}Config")(
            **TINY
            | {"vocab_size": NUM_IDS, "max_position_embeddings": 80, "n_positions": 80}
            | {"qa_dropout": 0.0, "summary_last_dropout": 0.0, "summary_first_dropout": 0.0}
            | self.values,
        )
        for name, value in ids.items():
            setattr(config, name, value)
        getattr(transformers, self.name)(config).save_pretrained("model")
        save_tokenizer(Path("model"), NUM_IDS)
        write_lines(Path("data.jsonl"), [RECORDS[self.records](i) for i in range(20)])


CAUSAL, MASKED, SEQ2SEQ = "ForCausalLM", "ForMaskedLM", "ForConditionalGeneration"
CLASSIFIES = "ForSequenceClassification"
JOBS = [
    Job("Llama", CAUSAL, "text"),
    Job("T5", SEQ2SEQ, "target"),
    Job("Bert", MASKED, "text"),
    Job("Bert", "ForQuestionAnswering", "span", {"num_labels": 2}),
    Job("Bert", CLASSIFIES, "pair", LABELS),
    Job("Bert", "ForMultipleChoice", "choice"),
]
MORE = [
    Job("Bert", CLASSIFIES, "number", {"num_labels": 1}),
    Job("DistilBert", "ForTokenClassification", "tags", LABELS),
    *(Job(prefix, CAUSAL, "text") for prefix in ("Mistral", "Qwen3", "Gemma", "OPT", "GPTNeoX")),
    Job("GPT2", "LMHeadModel", "text"),
    *(Job(prefix, MASKED, "text") for prefix in ("Roberta", "DistilBert", "Electra")),
    *(Job(prefix, SEQ2SEQ, "target") for prefix in ("Bart", "Pegasus")),
    *(Job(prefix, CLASSIFIES, "class", LABELS) for prefix in ("Llama", "GPT2", "DebertaV2")),
    *(Job(p, "ForTokenClassification", "tags", LABELS) for p in ("Bert", "Electra", "GPT2")),
    *(Job(p, "ForQuestionAnswering", "span", {"num_labels": 2}) for p in ("DistilBert", "Roberta")),
    *(Job(prefix, "ForMultipleChoice", "choice") for prefix in ("Electra", "Roberta")),
]


def batches(line: str) -> list[dict[str, Tensor]]:
    """Give the samples of each step in one micro-batch, as the data and the masks have them."""
    run = assemble(prepared(" ".join(overrides(line))).config, World())
    feed = run.feed(World())
    found = [feed.next().micro_batches[0].fields for _ in range(STEPS)]
    feed.close()
    return [dict(fields) for fields in found]


def own_loss(model: Any, fields: Mapping[str, Tensor]) -> Tensor:
    """Take the loss that the class of transformers computes."""
    if "start_positions" not in fields:
        return model(**fields).loss
    # Theirs lets an answer lie in the padding, which a sample alone has none of.
    lengths = fields["attention_mask"].sum(1).tolist()
    apart = [
        model(
            **{n: f[i : i + 1, :length] if f.dim() > 1 else f[i : i + 1] for n, f in fields.items()}
        )
        for i, length in enumerate(lengths)
    ]
    return sum(output.loss for output in apart) / len(apart)


def steps_by_hand(model: nn.Module, steps: list[dict[str, Tensor]]) -> tuple[list[float], ...]:
    """Take the steps of a loop; gives losses and gradient norms."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.999))
    losses, norms = [], []
    for fields in steps:
        loss = own_loss(model, fields)
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        losses.append(loss.detach().item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def assert_takes_their_steps(job: Job, line: str, dtype: str) -> None:
    """Compare a typed run, and its export, with the loop by hand."""
    line = f"{LINE} {line}"
    run = go(line)
    kind, limit = getattr(transformers, job.name), EXACT[dtype]
    model = kind.from_pretrained("model", dtype=getattr(torch, dtype)).train()
    steps = batches(line.replace("accum.micro=4", "accum.micro=6"))
    losses, norms = steps_by_hand(model, steps)
    assert curve(run, "loss") == pytest.approx(losses, rel=limit)
    assert curve(run, "grad_norm") == pytest.approx(norms, rel=10 * limit)
    found, theirs = state(run), {n: p.detach() for n, p in model.named_parameters()}
    largest = max(float(parameter.abs().max()) for parameter in theirs.values())
    for name, parameter in theirs.items():
        assert float((found[f"model.{name}"] - parameter).abs().max()) <= limit * largest, name
    assert shell(f"export run={run.folder} export.to=out") == 0
    exported = kind.from_pretrained("out", dtype=getattr(torch, dtype)).eval()
    with torch.no_grad():
        one, other = (each.eval()(**steps[0]).to_tuple() for each in (exported, model))
    assert len(one) > 1
    for mine, each in zip(one, other, strict=True):
        if isinstance(each, Tensor):
            torch.testing.assert_close(mine, each, rtol=1e3 * limit, atol=1e3 * limit)


@pytest.fixture
def wide_losses(monkeypatch):
    """Compute losses in the dtype of the logits: heads of transformers round them to float32."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


@pytest.mark.usefixtures("wide_losses")
@pytest.mark.parametrize(
    "job", [JOBS[0], *map(slow, JOBS[1:4]), *map(nightly, [*JOBS[4:], *MORE])], ids=str
)
def test_a_typed_run_takes_the_steps_of_transformers_and_its_export_gives_their_logits(job):
    job.save()
    assert_takes_their_steps(job, "model.dtype=float64", "float64")


def test_a_checkpoint_in_bf16_is_trained_in_fp32_as_transformers_does():
    JOBS[0].save()
    kind = getattr(transformers, JOBS[0].name)
    kind.from_pretrained("model", dtype=torch.bfloat16).save_pretrained("model")
    assert json.loads(Path("model/config.json").read_text())["dtype"] == "bfloat16"
    assert_takes_their_steps(JOBS[0], "", "float32")


def test_the_comparison_has_teeth():
    JOBS[0].save()
    with pytest.raises(AssertionError):
        assert_takes_their_steps(JOBS[0], "model.dtype=float64 batch.normalizer=samples", "float64")
