"""Jobs of Hugging Face as they are typed: a model's folder and a file of records."""

from pathlib import Path

import pytest
import transformers

from tests.lib.hf_toys import TEMPLATE, TEXTS, save_llama, save_tokenizer, write_lines
from tests.lib.run_support import go, read_json, shell
from trainer.core.errors import DataError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A causal model with its tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    save_llama(folder)
    save_tokenizer(folder, chat_template=TEMPLATE)
    return folder


def test_text_and_conversations_are_typed_without_an_objective(llama, capsys):
    write_lines(Path("corpus.jsonl"), [{"text": text} for text in TEXTS])
    line = f"model=hf model.path={llama} data=hf batch.global=32 steps=2"
    go(f"{line} data.path=corpus.jsonl")
    shown = " ".join(capsys.readouterr().out.split())
    assert "held out text (text)" in shown
    assert "next_token, as the model is made for causal_lm" in shown
    turns = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": text}]}
        for text in [*TEXTS, "batch " * 70]
    ]
    write_lines(Path("chat.jsonl"), turns)
    write_lines(Path("other.jsonl"), [*turns[:5], *turns[-1:] * 3])
    go(f"command=plan {line} data.path=chat.jsonl eval.sets.more.path=other.jsonl")
    shown = " ".join(capsys.readouterr().out.split())
    # The model has 64 positions.
    assert " chat (messages), 1 left out objective" in shown
    assert " data 1 longer than data.max_length left out" in shown
    assert "more: chat (messages), 3 left out more: 3 longer than data.max_length" in shown
    assert shown.count("chat (messages)") == 2, "what is held out here is of the same records"


@pytest.mark.slow
def test_a_classifier_among_decoders_reads_its_last_token_and_not_the_padding(llama, capfd):
    """The loss of padded micro-batches is that of every record alone."""
    rows = [{"text": text, "label": "long" if len(text) > 30 else "short"} for text in TEXTS]
    write_lines(Path("reviews.jsonl"), rows)
    line = f"model=hf model.path={llama} model.task=sequence_classification data=hf"
    line += " data.path=reviews.jsonl data.holdout=0 batch.global=60 steps=1 optimizer.lr=1e-12"
    together, alone = go(line), go(f"{line} accum.micro=1")
    assert "0 held out, 2 classes" in capfd.readouterr().out
    assert read_json(together.folder / "plan.json")["label_names"] == ["long", "short"]
    assert alone.result["loss"] == pytest.approx(together.result["loss"], rel=1e-5)
    assert shell(f"export run={together.folder} export.to=tuned") == 0
    assert read_json(Path("tuned/config.json"))["pad_token_id"] == 2


def test_an_export_does_not_name_the_end_of_a_text_as_padding():
    """Whoever loads it would have an embedding of the end without a gradient."""
    save_llama(Path("plain"), 300)
    save_tokenizer(Path("plain"), pad_token=None)
    write_lines(Path("corpus.jsonl"), [{"text": text} for text in TEXTS])
    run = go("model=hf model.path=plain data=hf data.path=corpus.jsonl steps=1")
    assert shell(f"export run={run.folder} export.to=next") == 0
    model = transformers.AutoModelForCausalLM.from_pretrained("next")
    assert model.config.pad_token_id is None
    assert model.get_input_embeddings().padding_idx is None


def test_a_tokenizer_of_another_model_is_named_at_the_start(llama, capsys):
    write_lines(Path("corpus.jsonl"), [{"text": text} for text in TEXTS])
    line = f"tokenizer.path={llama} data=hf data.path=corpus.jsonl steps=1 model=hf"
    save_llama(Path("other"), num_ids=310)
    go(f"{line} model.path=other")
    shown = " ".join(capsys.readouterr().out.split())
    assert "tokenizer: 300 ids, but the model has 310 rows for them" in shown
    save_llama(Path("same"), num_ids=300)
    for texts, is_named in (([" ".join(TEXTS)[::-1]], True), (TEXTS, False)):
        save_tokenizer(Path("same"), texts=texts)
        go(f"{line} model.path=same")
        shown = " ".join(capsys.readouterr().out.split())
        assert ("it seems to be of another model" in shown) is is_named
    save_llama(Path("small"), num_ids=200)
    with pytest.raises(DataError, match=r"input_ids holds .*the model's vocabulary is 0 to 199"):
        go(f"{line} model.path=small")
