"""The page of runs: whole, escaped, by itself, whatever a run left behind."""

import json

import pytest

from tests.lib.page_support import PLAN, RESULT, entry, page_of, saved
from tests.lib.run_support import shell
from trainer.features.page.asked import data_name, model_name
from trainer.features.page.curves import MOST_POINTS, charts_of, series_of
from trainer.features.page.saved_run import SavedRun
from trainer.report.views import write_views


def test_a_page_shows_what_a_run_left_behind(tmp_path):
    odd = {"odd_number": 7}
    lines = [entry(1), entry(2, skipped="not finite", odd_number=8), entry(3, replays=1, **odd)]
    lines += [{"step": 3, "eval_loss": 1.5, "eval_f1": 0.25}]
    status = {"state": "completed", "exit_code": 0, "step": 3, "reason": None}
    run = saved(tmp_path / "run", lines, plan=PLAN, result=RESULT, status=status)
    (run / "config.yaml").write_text("name: mine\nbatch: {global: 8}\n")
    found = page_of(run)
    for text in (
        "mine completed ◐ gpt_tiny · stdlib · ",
        "held-out loss 1.5000 best 1.5000 at step 3",
        "f1 0.25",
        "best f1 0.75 at step 2",
        "stop.metric=eval_f1: no better",
        "skipped steps 1 ",
        "replays 1 ",
        "the batch is odd",
        "data: 30% of a step",
        "a larger batch pays",
        "8 samples a step · 3 micro-batches · 2 accumulation steps · 25.0% padding",
        "limit 4.00 MiB, of which 75.0% is predicted",
        "500 ms a step, mean of 3 steps",
        "bigram 2.0000 0.5000 better",
        "batch.global 8",
        "model gpt_tiny, 1,234 parameters, 1,200 of them trained",
        "data stdlib, 2 samples, 5 tokens, 9 held out",
        "objective next_token, as typed",
        "batch 8 samples a step, loss: sum / all loss terms of the step",
        "optimizer adamw, betas [0.9,0.95]",
        "learning rate 0.012, cosine, 1 step of warm-up",
        "source code git abc123, with changes in 2 files that are not committed",
        "odd number",
        "1 skipped step 1 replay",
        "eval.predictions=true",
    ):
        assert text in found.text, text
    parts = ["held-out loss", "Curves", "Worth knowing", "What was asked for", "The plan"]
    places = [found.text.index(part) for part in parts]
    assert places == sorted(places), "results first, then what was asked for, then the plan"
    (drawn,) = json.loads(found.data)["runs"]
    assert [kind for _, kind in drawn["marks"]] == ["skipped step", "replay"]
    assert drawn["x"]["seconds"] == [0, 0.5, 1.0, 1.5]
    assert drawn["curves"]["eval_loss"][:2] == [[3], [1.5]]


HUB = "/cache/hub/models--org--tiny-bert/snapshots/0a1b"


@pytest.mark.parametrize(
    ("config", "plan", "names"),
    [
        ({"model": {"path": "org/bert"}}, {"model": "hf"}, ("org/bert", "")),
        ({"model": {"path": "/models/my bert"}}, {"model": "hf"}, ("my bert", "")),
        ({"model": {"path": HUB}}, {}, ("org/tiny-bert", "")),
        ({"model": {"config": {"model_type": "t5"}}}, {}, ("t5 with random weights", "")),
        ({"model": {"config": "/a/llama.json"}}, {}, ("llama.json with random weights", "")),
        ({"model": {"_target_": "mine.Net"}}, {"model": "mine.Net"}, ("mine.Net", "")),
        ({"choices": {"model": "vit"}, "data": {"path": "/d/photos"}}, {}, ("vit", "photos")),
        ({"data": {"sources": {"web": {}, "chat": {"path": "/d/c"}}}}, {}, ("", "web, chat")),
    ],
)
def test_models_and_data_have_the_names_that_people_know(tmp_path, config, plan, names):
    run = saved(tmp_path / "run", [], plan=plan)
    (run / "config.yaml").write_text(json.dumps(config))
    found = SavedRun(run)
    assert (model_name(found), data_name(found).removeprefix("mixture of ")) == names


def test_a_run_that_failed_shows_the_end_of_its_traceback_and_all_of_it_below(tmp_path):
    run = saved(tmp_path / "run", [entry(1)], status={"state": "failed", "exit_code": 1})
    (run / "errors").mkdir()
    frames = [f"  File line {n}" for n in range(30)]
    text = "\n".join(["Traceback", *frames, "ValueError: the mask"])
    (run / "errors" / "rank1.txt").write_text(text)
    found = page_of(run).text
    end, _, whole = found.partition("All of it")
    assert "File line 3 " not in end
    assert "File line 29 ValueError: the mask" in end
    assert "Traceback File line 0 File line 1 " in whole
    assert whole.index("ValueError: the mask") < whole.index("Curves")


def test_a_page_says_from_which_run_and_step_a_run_went_on(tmp_path):
    run = saved(tmp_path / "run", [entry(1), entry(3)], plan={"resumed_step": 2})
    (run / "forked.json").write_text(json.dumps({"run": "outputs/a", "step": 1}))
    assert "forked from outputs/a at step 1 · resumed after step 2 " in page_of(run).text
    (run / "plan.json").write_text(json.dumps({"resumed_step": None}))
    (run / ".hydra" / "resumed").mkdir(parents=True)
    assert "begun again: nothing had been saved" in page_of(run).text


def test_figures_of_hooks_are_drawn_at_once_and_those_of_many_blocks_a_click_away(tmp_path):
    blocks = {f"weight_norm/{i}": 0.5 for i in range(40)}
    lines = [entry(i, mine=i, **{name: i * n for name, n in blocks.items()}) for i in (1, 2)]
    page_of(saved(tmp_path / "run", lines))
    at_once, _, folded = (tmp_path / "page.html").read_text().partition("<details>")
    assert "<b>mine</b>" in at_once
    assert "<b>weight norm/39</b>" in folded


def test_spikes_and_gaps_outlive_thinning(tmp_path):
    lines = [entry(i, loss=1.0, lr=i) for i in range(1, 10_001)]
    lines[7_321]["loss"], lines[2_500]["loss"] = 99.0, None
    run = SavedRun(saved(tmp_path / "run", lines))
    drawn = series_of(run, charts_of([run]), 1)["curves"]
    places, values, middles, means = drawn["loss"]
    assert len(values) <= MOST_POINTS + 3
    assert 99.0 in values
    assert None in values
    assert places == sorted(places)
    assert max(means) < 3, "which are smoothed, and hold no spike"
    assert len(middles) == len(means)
    assert drawn["lr"][1][0], drawn["lr"][1][-1] == (1, 10_000)


def test_texts_of_a_run_are_never_markup(tmp_path):
    evil = '</script><script>alert("x")</script><b a=\'"'
    status = {"state": "failed", "exit_code": 1, "step": 1, "reason": evil}
    worst = {"worst": [{"id": evil, "loss": 2.5, "text": evil, "label": evil, "set": evil}]}
    lines = [entry(1, **{evil: 3.0})]
    plan = PLAN | {"warnings": [evil], "unit": evil, "memory_parts": {evil: 1}}
    run = saved(tmp_path / "run", lines, status=status, evaluate=worst, plan=plan)
    (run / "config.yaml").write_text(json.dumps({"name": evil, evil: evil}))
    (run / "generated.jsonl").write_text(json.dumps({"step": 1, "prompt": evil, "text": evil}))
    (run / "predictions.jsonl").write_text(json.dumps({"label": evil, "prediction": evil}))
    found = page_of(run)
    assert found.text.count(evil) >= 13
    assert json.loads(found.data)["runs"][0]["name"] == evil
    assert (run.parent / "page.html").read_text().lower().count("<script") == 2


ODD = json.dumps(
    {name: [{}, "x"] for name in [*PLAN, *RESULT]} | {"state": "completed", "worst": [1]}
)
LEFT = {
    "nothing": {},
    "torn": {"metrics.jsonl": json.dumps(entry(1)) + '\n{"step": 2, "lo'},
    "odd values": {
        "metrics.jsonl": '{"step": 1, "loss": "x", "lr": [], "seconds": {}}\n{"eval_loss": null}\n',
        **dict.fromkeys(("plan.json", "result.json", "status.json", "evaluate.json"), ODD),
        **{"forked.json": ODD, "config.yaml": "[1, 2]"},
    },
    "odd files": {"plan.json": "{", "config.yaml": "{", "metrics.jsonl": "\xff\x00\n"},
}


@pytest.mark.parametrize("left", LEFT)
def test_a_page_is_made_of_whatever_is_left(tmp_path, left):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    for name, text in LEFT[left].items():
        (tmp_path / "run" / name).write_bytes(text.encode("latin-1"))
    found = page_of(tmp_path / "run")
    assert ("No step was taken yet." in found.text) == (left != "torn")


def test_what_cannot_be_written_is_one_warning(tmp_path, caplog):
    run = saved(tmp_path / "run", [entry(1)])
    (run / "report.html").mkdir()
    write_views(run)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "report.html could not be written" in caplog.text


def test_the_command_writes_where_it_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs" / "day").mkdir(parents=True)
    for name in ("a", "b"):
        saved(tmp_path / "outputs" / "day" / name, [entry(1)])
    assert shell("report run=outputs/day/a,outputs/day/b") == 0
    assert capsys.readouterr().out == "2 runs: outputs/report.html\n"
    assert shell("report run=[outputs/day/a] to=one.html") == 0
    assert capsys.readouterr().out == "1 run: one.html\n"
    assert shell("report run=auto") == 0
    assert capsys.readouterr().out == "1 run: outputs/day/b/report.html\n"
    assert shell("report run=outputs/day") == 0
    assert capsys.readouterr().out == "2 runs: outputs/day/report.html\n"
    assert shell("report run=outputs/day/a to=markdown") == 0
    assert "| training loss | 4.0000 |" in capsys.readouterr().out
    assert not (tmp_path / "markdown").exists()
