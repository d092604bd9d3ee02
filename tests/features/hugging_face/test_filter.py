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
