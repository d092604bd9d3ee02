"""Samples on a page: pictures, texts over time, and predictions by class."""

import json

import pytest

from tests.lib.page_support import entry, page_of, saved
from trainer.features.page.classes import MOST_SHOWN, classes
from trainer.features.page.samples import texts, worst
from trainer.features.page.saved_run import SavedRun

PNG = b"\x89PNG\r\n\x1a\n..."


def test_the_worst_samples_are_shown_as_pictures_of_the_run_alone(tmp_path):
    names = ["worst/0.png", "../secret.png", "worst/1.png", "worst/2.png", 7, "worst/3.png"]
    lines = [{"id": n, "loss": 1.0, "text": "t", "picture": name} for n, name in enumerate(names)]
    run = saved(tmp_path / "run", [entry(1)], evaluate={"worst": lines})
    (run / "worst").mkdir()
    (run / "worst" / "0.png").write_bytes(PNG)
    (run / "worst" / "1.png").write_bytes(b"no picture")
    (tmp_path / "secret.png").write_bytes(PNG)
    (run / "worst" / "2.png").symlink_to(tmp_path / "secret.png")
    assert [bool(picture) for _, _, picture in worst(SavedRun(run))] == [True, *[False] * 5]
    page_of(run)
    page = (tmp_path / "page.html").read_text()
    assert page.count('src="data:image/png;base64,iVBORw0KGgouLi4="') == 1
    assert "img-src data:;" in page
    # A page of several runs, which may be many, names the samples alone.
    page_of(run, saved(tmp_path / "other", [entry(1)]))
    assert "iVBORw" not in (tmp_path / "page.html").read_text()


def test_what_followed_a_prompt_is_shown_over_time_the_newest_first(tmp_path):
    run = saved(tmp_path / "run", [entry(1)])
    lines = [
        {"step": step, "prompt": p, "text": f"{p}{step}"} for step in range(1, 101) for p in "ba"
    ]
    (run / "generated.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (prompt, found), (other, _) = texts(SavedRun(run))
    assert (prompt, other) == ("b", "a")
    assert len(found) == 12
    assert (found[0], found[-1]) == ((100, "b100"), (1, "b1"))
    assert "b step 100 b100 step 91 b91" in page_of(run).text


def predicted(folder, pairs, **files):
    run = saved(folder, [entry(1)], **files)
    lines = [{"label": label, "prediction": prediction} for label, prediction in pairs]
    (run / "predictions.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return run


def test_predictions_are_counted_by_class_with_precision_and_recall(tmp_path):
    pairs = [("cat", "cat"), ("cat", "cat"), ("cat", "dog"), ("dog", "dog"), (-100, "dog")]
    plan = {"label_names": ["dog", "cat", "cow"]}
    run = predicted(tmp_path / "run", pairs, plan=plan)
    (found,) = classes(SavedRun(run))
    assert found.note == "4 samples, 75.0% right"
    assert [(name, [count for count, *_ in cells]) for name, cells in found.matrix()] == [
        ("dog", [1, 0, 0]),
        ("cat", [1, 2, 0]),
        ("cow", [0, 0, 0]),
    ]
    assert [*found.rows()] == [
        ("dog", "50.0%", "100.0%", "1"),
        ("cat", "100.0%", "66.7%", "3"),
        ("cow", "-", "-", "0"),
    ]
    assert "cow - - 0" in page_of(run).text


@pytest.mark.parametrize(
    ("pairs", "names"),
    [
        ([(10, 9), (2, 10)], ["2", "9", "10"]),
        ([(n, n) for n in range(MOST_SHOWN)], [str(n) for n in range(MOST_SHOWN)]),
        ([(n, n) for n in range(MOST_SHOWN + 1)], None),
        ([(["B", "I"], ["B", "B"])], None),
        ([(0.5, 0.25)], None),
        ([(None, None)], None),
    ],
)
def test_one_class_a_sample_is_counted_up_to_twenty_classes(tmp_path, pairs, names):
    found = classes(SavedRun(predicted(tmp_path / "run", pairs)))
    assert [each.names for each in found] == ([] if names is None else [names])


def test_each_held_out_set_has_its_classes(tmp_path):
    sets = {"web": {}, "../odd": {}}
    run = predicted(tmp_path / "run", [(1, 1)], evaluate={"sets": sets})
    (run / "predictions.jsonl").rename(run / "predictions-web.jsonl")
    assert [each.set_name for each in classes(SavedRun(run))] == ["web"]
