"""Chat as it is typed: a model's folder and a file of conversations."""

from pathlib import Path

import pytest
import torch
import transformers
from torch.nn import functional

from tests.lib.chats import CHATML, chat_tokenizer, chatml_pieces, conversations
from tests.lib.hf_toys import save_llama, write_lines
from tests.lib.run_support import curve, entries, go, read_json

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
LINE = "model=hf model.path=model data=hf data.path=chat.jsonl batch.global=16"
EXACT = 1e-10


@pytest.fixture(autouse=True)
def files(own_folder):
    save_llama(Path("model"), 400, max_position_embeddings=512)
    chat_tokenizer(CHATML).save_pretrained("model")
    records = [{"messages": messages} for messages in conversations(40)]
    write_lines(Path("chat.jsonl"), records)


def test_packed_conversations_give_the_loss_of_padded_ones_and_of_a_loop_by_hand():
    line = f"{LINE} model.dtype=float64 steps=1 accum=budget accum.max_tokens=1024"
    padded, packed = (go(f"{line} accum.packed={way}") for way in ("false", "true"))
    assert read_json(packed.folder / "plan.json")["padding"] == 0
    for name in ("loss", "grad_norm"):
        assert curve(packed, name) == pytest.approx(curve(padded, name), rel=EXACT)
    verdict = read_json(go(f"command=verify {line} accum.packed=true").folder / "verify.json")
    assert verdict["verdict"] == "exact"
    first = entries(padded, "samples.jsonl")[0]["ids"]
    assert curve(padded, "loss")[0] == pytest.approx(loss_by_hand(first), rel=EXACT)


def loss_by_hand(ids: list[int]) -> float:
    """Mean cross entropy over the answers of some conversations."""
    model = transformers.AutoModelForCausalLM.from_pretrained("model", dtype=torch.float64)
    tokenizer, total, terms = chat_tokenizer(), 0.0, 0
    for i in ids:
        tokens, labels = list[int](), list[int]()
        for text, counts in chatml_pieces(conversations(40)[i]):
            piece = tokenizer(text, add_special_tokens=False)["input_ids"]
            tokens, labels = tokens + piece, labels + (piece if counts else [-100] * len(piece))
        with torch.no_grad():  # its own loss would be in fp32
            logits = model(torch.tensor([tokens])).logits[0, :-1]
        found = functional.cross_entropy(logits, torch.tensor(labels[1:]), reduction="sum")
        total, terms = total + float(found), terms + sum(label != -100 for label in labels)
    return total / terms


def test_a_plan_shows_answers_in_brackets_as_the_template_writes_them():
    run = go(f"command=plan {LINE} data.show=3")
    first, *more = read_json(run.folder / "plan.json")["shown_samples"]
    for sample in (first, *more):
        pieces = chatml_pieces(conversations(40)[sample["id"]])
        assert sample["text"] == "".join(f"[[{t}]]" if counts else t for t, counts in pieces)
