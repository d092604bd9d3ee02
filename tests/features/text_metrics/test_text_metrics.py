"""Metrics of entities and of texts, against the libraries, on samples of many lengths."""

from pathlib import Path

import pytest
import seqeval.metrics
import torch
from rouge_score.rouge_scorer import RougeScorer
from torch import Tensor, nn

from tests.lib.hf_toys import TEXTS, save_job_files, write_lines
from tests.lib.run_support import entries, go, read_json, shell
from trainer.features.text_metrics.answers import AskedSample, joined
from trainer.features.text_metrics.metrics import CorpusScore, EntityF1, ExactMatch, RougeL
from trainer.models.bind import bind
from trainer.objectives.next_token import NextToken
from trainer.objectives.text_output import TextOutput

TRUE = [["B-PER", "I-PER", "O"], ["O", "B-LOC"], []]
FOUND = [["B-PER", "I-PER", "O"], ["B-LOC", "I-LOC"], []]


def test_entities_count_by_kind_and_both_ends():
    scores = EntityF1().score(FOUND, TRUE)
    assert scores == {"entity_f1": 0.5, "entity_precision": 0.5, "entity_recall": 0.5}
    # Of tokens three of five are right.
    assert EntityF1().score([["O"]], [["O"]])["entity_f1"] == 0.0


def test_texts_are_scored_as_libraries_score_them():
    found, wanted = ["the cat sat", "A b"], ["the cat sat down", "a b"]
    assert RougeL().score(found, wanted)["rouge_l"] == pytest.approx((6 / 7 + 1) / 2)
    assert RougeL(use_stemmer=True).score(["sitting"], ["sits"])["rouge_l"] == 1.0
    assert ExactMatch().score([" a b", "x"], ["a b ", "y"])["exact_match"] == 0.5
    assert CorpusScore("chrf").score(["ab"], ["ab"])["chrf"] == pytest.approx(100.0)
    assert CorpusScore("bleu").score(["a b c d"], ["a b c d"])["bleu"] == pytest.approx(100.0)


class Next(nn.Module):
    """Follows each token by the one behind it; padding would be followed, too."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        assert attention_mask.shape == input_ids.shape
        return nn.functional.one_hot((input_ids + 1) % 12, 12).double()


def test_the_last_answer_is_asked_for_and_rows_of_any_length_are_continued_together():
    objective, text = NextToken(), TextOutput(ends={11}, most=4, limit=7)
    rows = [([1, 2, 3, 4, 5, 11], [-100, 2, -100, 4, 5, 11]), ([8, 9, 10], [-100, 9, 10])]
    rows.append(([1, 1, 1, 1, 1, 1, 9], [-100] * 6 + [9]))
    asked = []
    for ids, labels in rows:
        fields = {"input_ids": torch.tensor([ids]), "labels": torch.tensor([labels])}
        found = AskedSample.of(objective, fields)
        assert found is not None
        asked.append(found)
    assert [(each.begun, each.reference(text)) for each in asked[:2]] == [
        ([1, 2, 3], [4, 5]),
        ([8], [9, 10]),
    ]
    together = objective.predict(bind(Next()), joined(asked, 0), text)
    assert [line["prediction"] for line in together] == [[4, 5, 6, 7], [9, 10], [2]]
    whole = {"input_ids": torch.tensor([[1, 2]]), "labels": torch.tensor([[1, 2]])}
    assert AskedSample.of(objective, whole) is None


def test_entity_f1_of_a_run_is_that_of_seqeval_over_its_predictions():
    save_job_files("bert")
    kinds = ("O", "B-A", "I-A")
    tagged = [{"tokens": t.split(), "tags": [kinds[len(w) % 3] for w in t.split()]} for t in TEXTS]
    write_lines(Path("ner.jsonl"), tagged)
    run = go(
        "model=hf model.path=bert model.task=token_classification data=hf data.path=ner.jsonl "
        "data.holdout=0.3 steps=3 optimizer.lr=0.05 objective.metrics=[entity_f1,f1] "
        "checkpoint.best=eval_entity_f1"
    )
    assert shell(f"evaluate run={run.folder} eval.predictions=true") == 0
    lines, record = entries(run, "predictions.jsonl"), read_json(run.folder / "evaluate.json")
    labels, found = ([line[name] for line in lines] for name in ("label", "prediction"))
    expected = seqeval.metrics.f1_score(labels, found, zero_division=0)
    assert record["eval_entity_f1"] == expected
    assert record["eval_f1"] != expected
    assert read_json(run.folder / "result.json")["best"]["metric"] == "eval_entity_f1"
    assert "f1 (macro)" in (run.folder / "train.log").read_text()


def test_answers_to_chats_are_written_and_scored_by_a_class_of_ones_own(capsys):
    save_job_files("llama")
    Path("words_of_mine.py").write_text(
        "class Length:\n"
        "    def score(self, predictions, references):\n"
        "        return {'letters': sum(map(len, references)) / len(references)}\n"
    )
    run = go(
        "model=hf model.path=llama data=hf data.path=chat.jsonl data.holdout=0.2 steps=1 "
        "objective.metrics=[rouge_l,words_of_mine.Length] log.generate_tokens=5 "
        "stop.metric=eval_rouge_l"
    )
    (last,) = [e for e in entries(run) if "eval_rouge_l" in e]
    assert shell(f"evaluate run={run.folder} eval.predictions=true trust=[words_of_mine]") == 0
    lines = entries(run, "predictions.jsonl")
    assert {line["label"] for line in lines} <= {*TEXTS}
    score = RougeScorer(["rougeL"]).score
    each = [score(line["label"], line["prediction"])["rougeL"].fmeasure for line in lines]
    assert last["eval_rouge_l"] == pytest.approx(sum(each) / len(each), abs=1e-12)
    letters = sum(len(line["label"]) for line in lines) / len(lines)
    assert last["eval_letters"] == pytest.approx(letters)
    # Of the same records the command for data without labels says the same.
    rows = Path("chat.jsonl").read_text().splitlines(keepends=True)
    Path("asked.jsonl").write_text("".join(rows[line["id"]] for line in lines))
    assert shell(f"predict run={run.folder} data.path=asked.jsonl trust=[words_of_mine]") == 0
    figures = f"rouge_l {last['eval_rouge_l']:.4f}, letters {letters:.4f}"
    text = f"against the references of {len(lines)} records: {figures}"
    assert text in " ".join(capsys.readouterr().out.split())
