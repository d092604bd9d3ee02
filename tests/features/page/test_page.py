"""The page of runs: whole, escaped, by itself, whatever a run left behind."""

import json
import re
from html.parser import HTMLParser

import pytest

from tests.lib.run_support import shell
from trainer.features.page.curves import MOST_POINTS, charts_of, series_of
from trainer.features.page.page import write_page
from trainer.features.page.saved_run import SavedRun
from trainer.report.views import write_views

VOID = {"input", "meta", "br"}


class Page(HTMLParser):
    """Parses a page strictly: every tag is closed in order, and nothing is fetched."""

    def __init__(self, text):
        super().__init__()
        self.open, self.texts, self.ids, self.data = [], [], [], ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        assert tag not in {"link", "img", "iframe", "object", "embed"}
        assert not {"src", "href", "srcset"} & {name for name, _ in attrs}
        assert not [name for name, _ in attrs if name.startswith("on")]
        self.open += [] if tag in VOID else [tag]
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] == ["script"]:
            self.data = self.data or data
        elif self.open[-1:] != ["style"]:
            self.texts.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())


def page_of(*folders):
    file = folders[0].parent / "page.html"
    write_page(folders, file)
    text = file.read_text()
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import|url\(", text)
    return Page(text)


def entry(step, **more):
    counts = {"step": step, "samples": 8 * step, "tokens": 100 * step, "seconds": 0.5}
    return {**counts, "loss": 4.0 / step, "lr": 0.01, **more}


def saved(folder, entries, **files):
    """A run's folder with records as they are written."""
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in entries))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


PLAN = {
    "shapes": [
        {"rank": 0, "num_samples": 4, "length": 10, "packed": False, "num_tokens": 30},
        {"rank": 0, "num_samples": 2, "length": 8, "packed": False, "num_tokens": 16},
        {"rank": 1, "num_samples": 2, "length": 10, "packed": True, "num_tokens": 10},
    ],
    "warnings": ["the batch is odd"],
    "padding": 0.25,
    "global_batch": 8,
    "unit": "samples",
    "predicted_peak_bytes": 3 << 20,
    "memory_limit_bytes": 4 << 20,
    "memory_parts": {"activations": 3 << 20},
    "num_tokens": 5,
    "num_samples": 2,
    "steps": 3,
    "device": "cuda",
}
RESULT = {
    "peak_bytes": 2 << 20,
    "eval_loss": 1.5,
    "baselines": {"bigram": 2.0},
    "best": {"metric": "eval_f1", "value": 0.75, "step": 2},
    "stopped": "stop.metric=eval_f1: no better",
    "advice": ["data: 30% of a step"],
    "batch_advice": "a larger batch pays",
    "time": {
        "steps": 3,
        "step_seconds": 0.5,
        "share": {"data": 0.3, "compute": 0.7},
        "seconds": {"data": 0.15, "compute": 0.35},
    },
}


def test_a_page_shows_what_a_run_left_behind(tmp_path):
    odd = {"odd_number": 7}
    lines = [entry(1), entry(2, skipped="not finite", odd_number=8), entry(3, replays=1, **odd)]
    lines += [{"step": 3, "eval_loss": 1.5, "eval_f1": 0.25}]
    status = {"state": "completed", "exit_code": 0, "step": 3, "reason": None}
    run = saved(tmp_path / "run", lines, plan=PLAN, result=RESULT, status=status)
    (run / "config.yaml").write_text("name: mine\nbatch: {global: 8}\n")
    found = page_of(run)
    for text in (
        "mine completed",
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
        "odd number",
        "1 skipped step 1 replay",
        "eval.predictions=true",
    ):
        assert text in found.text, text
    (drawn,) = json.loads(found.data)["runs"]
    assert [kind for _, kind in drawn["marks"]] == ["skipped step", "replay"]
    assert drawn["x"]["seconds"] == [0, 0.5, 1.0, 1.5]
    assert drawn["curves"]["eval_loss"][:2] == [[3], [1.5]]


def test_a_page_says_from_which_run_and_step_a_run_went_on(tmp_path):
    run = saved(tmp_path / "run", [entry(1), entry(2)], plan={"resumed_step": 2})
    assert "resumed after step 2, and took none since" in page_of(run).text
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(entry(3)))
    (run / "forked.json").write_text(json.dumps({"run": "outputs/a", "step": 1}))
    (run / "config.yaml").write_text("init: weights\n")
    text = "begun with the weights of weights · forked from outputs/a at step 1"
    assert f"{text} · resumed after step 2 " in page_of(run).text
    (run / "plan.json").write_text(json.dumps({"resumed_step": None}))
    (run / ".hydra" / "resumed").mkdir(parents=True)
    (run / "config.yaml").write_text("init: null\n")
    assert "weights of" not in page_of(run).text
    (run / ".hydra" / "overrides.yaml").write_text("- init='../first'\n")
    assert "begun with the weights of ../first" in page_of(run).text
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
    found = page_of(run)
    assert found.text.count(evil) >= 10
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


def table_of(folders):
    text = page_of(*folders).text
    return text.partition("Runs, and what differs")[2].partition("Curves")[0]


def ranked(folders):
    return re.findall(r"\b(\d) (?:unknown|failed|completed)", table_of(folders))


def add(folder, **figures):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 1, **figures}) + "\n")


def test_runs_are_compared_by_what_differs_and_the_best_is_first(tmp_path):
    folders = []
    for n, best in enumerate([3.0, 1.0, 2.0]):
        folders.append(saved(tmp_path / f"{n}", [entry(1), {"step": 1, "eval_loss": best}]))
        (folders[-1] / "config.yaml").write_text(f"seed: 7\noptimizer: {{lr: {n}e-3}}\n")
    table = table_of(folders)
    assert "seed" not in table
    assert "optimizer.lr" in table
    assert ranked(folders) == ["1", "2", "0"]
    for n, name in enumerate(["Cosine", "Linear", "Linear"]):
        text = f"steps: {n + 1}\nscheduler: {{_target_: trainer.optim.schedules.{name}}}\n"
        (folders[n] / "config.yaml").write_text(f"{text}choices: {{scheduler: {name.lower()}}}\n")
        add(folders[n], eval_accuracy=[0.5, 0.25, 0.75][n])
        add(folders[n], eval_f1=0.125, eval_seconds=2.0)
    table = table_of(folders)
    head = "steps done loss held-out loss held-out accuracy held-out f1 time steps scheduler"
    assert table.partition("run state ")[2].startswith(f"{head} 1 unknown")
    assert "0.1250" in table
    for folder in folders:
        (folder / "config.yaml").write_text("sweep: {metric: eval_accuracy, mode: auto}\n")
    assert ranked(folders) == ["2", "0", "1"]
    for n, folder in enumerate(folders):
        state = "failed" if n == 2 else "completed"
        (folder / "status.json").write_text(json.dumps({"state": state}))
    assert ranked(folders) == ["0", "1", "2"], "as a sweep's table"


def test_what_cannot_be_written_is_one_warning(tmp_path, caplog):
    run = saved(tmp_path / "run", [entry(1)])
    (run / "report.html").mkdir()
    write_views(run)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "report.html could not be written" in caplog.text


def test_runs_are_ranked_where_they_were_evaluated_on_the_same_tokens_and_else_not(tmp_path):
    def made(name, loss, held_out):
        lines = [entry(1), {"step": 1, "eval_loss": loss}]
        run = saved(tmp_path / name, lines, status={"state": "completed", "exit_code": 0})
        (checkpoint := run / "checkpoints" / "step-00000001").mkdir(parents=True)
        parts = {"terms": {"state": {"held_out": held_out}}}
        (checkpoint / "manifest.json").write_text(json.dumps({"parts": parts}))
        return run

    runs = [made("worse", 2.0, "a"), made("better", 1.0, "a"), made("unknown", 0.5, None)]
    text = page_of(*runs).text
    assert "the best eval_loss first" in text
    assert text.index("better completed") < text.index("worse completed")
    text = page_of(*runs, made("other", 0.1, "b")).text
    assert "not ranked: eval_loss is of other held-out samples, or other tokens of them" in text
    assert text.index("worse completed") < text.index("better completed")


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
