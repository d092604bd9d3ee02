"""Which records `data.filter` keeps: by numbers and texts, in every part, under their own lines."""

import pytest

from tests.lib.chats import CHATML, chat_tokenizer
from tests.lib.hf_toys import write_lines
from trainer.core.errors import DataError
from trainer.features.hugging_face.data_set import HuggingFaceData

ROWS = [("en", 1, "x"), ("de", 2, "y"), ("fr", 1, "z"), ("en", 2, "y"), ("en", 1, "y")]
LINES = [f"a {i},{a},{b},{c}" for i, (a, b, c) in enumerate(ROWS)]
CSV = "\n".join(["text,lang,split no,label", *LINES, ""])


def opened(file, **more):
    how = {"task": "sequence_classification", "holdout": 0.0, **more}
    return HuggingFaceData(str(file), chat_tokenizer(CHATML), **how)


@pytest.mark.parametrize(
    ("typed", "kept"),
    [
        ({"lang": "en"}, [2, 5, 6]),
        ({"lang": ["en", "de"], "split no": 2}, [3, 5]),
        ({"split no": 2.0}, [3, 5]),
        ({"split no": "1"}, [2, 4, 6]),
    ],
)
def test_records_with_the_value_are_kept_under_their_own_lines(tmp_path, typed, kept):
    file = tmp_path / "rows.csv"
    file.write_text(CSV)
    data = opened(file, filter=typed)
    facts = data.facts()
    assert [data.name_of(i).rpartition(":")[2] for i in range(len(data))] == [*map(str, kept)]
    labels = [ROWS[line - 2][2] for line in kept]
    names = sorted({*labels})
    assert ([*facts.label_names], [data[i]["labels"].item() for i in range(len(data))]) == (
        names,
        [names.index(label) for label in labels],
    )
    assert list(facts.class_counts()) == [labels.count(name) for name in names]
    rows = facts.describe_records(None)
    assert f"{len(kept)} of 5 records by data.filter" in rows[0].text
    assert not any(f"not read: {column}" in (rows[1].text or "") for column in typed)
    assert facts.fingerprint() != opened(file).facts().fingerprint()


def test_json_compares_as_cells_do_and_what_is_absent_is_an_empty_text(tmp_path):
    records = [{"text": "a", "label": 0, "ok": True}, {"text": "b", "label": 1}]
    file = write_lines(tmp_path / "rows.jsonl", records)
    assert len(opened(file, filter={"ok": True})) == len(opened(file, filter={"ok": None})) == 1
    with pytest.raises(DataError, match=r"data\.filter keeps no record"):
        opened(file, filter={"ok": True, "label": 1})


def test_cells_that_pandas_wrote_match_true_and_false(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text("text,label,ok\na,x,True\nb,y,False\nc,x,TRUE\nd,y,true\ne,x,\n")
    kept = {typed: len(opened(file, filter={"ok": typed})) for typed in (True, False, "true", None)}
    assert kept == {True: 3, False: 1, "true": 3, None: 1}


def test_a_column_that_the_filter_reads_is_not_refused_as_one_that_nothing_reads(tmp_path):
    record = {"prompt": "a", "completion": " b", "label": True, "system": "be good"}
    file = write_lines(tmp_path / "rows.jsonl", [record, {**record, "label": False}])
    for typed in ({"label": True}, {"system": "be good"}):
        with pytest.raises(DataError, match="changes what a record means"):
            opened(file, task="causal_lm", filter=typed)
    typed = {"label": True, "system": "be good"}
    assert len(opened(file, task="causal_lm", filter=typed)) == 1
    trained = {"name": "prompt and completion", "columns": {"prompt": "prompt"}}
    asked = {"task": "causal_lm", "learns": False, "trained_format": trained}
    assert len(opened(file, **asked, filter={"system": "be good"})) == 2


def test_of_records_to_predict_those_with_the_value_have_their_own_numbers(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text(f"{CSV}too,few\n")
    data = opened(file, filter={"lang": "en"}, learns=False)
    found = [(each.number, each.place, [*each.samples]) for each in data.predicted_records()]
    numbers = [(0, [0]), (3, [1]), (4, [2]), (5, [])]
    assert found == [(i, f"rows.csv:{i + 2}", samples) for i, samples in numbers]
