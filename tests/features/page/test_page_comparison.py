"""Runs side by side: what differs first, and figures where they compare."""

import json
import re

from tests.lib.page_support import entry, finished, page_of, saved
from trainer.features.page.comparison import Comparison
from trainer.features.page.markdown import markdown
from trainer.features.page.saved_run import SavedRun


def test_runs_are_compared_by_what_differs_and_the_best_is_first(tmp_path):
    folders = []
    for n, best in enumerate([3.0, 1.0, 2.0]):
        lines = [entry(1), {"step": 1, "eval_loss": best}]
        folders.append(saved(tmp_path / f"{n}", lines))
        (folders[-1] / "config.yaml").write_text(f"seed: 7\noptimizer: {{lr: {n}e-3}}\n")
    found = page_of(*folders)
    table = found.text.partition("Runs, and what differs")[2].partition("Curves")[0]
    assert "seed" not in table
    assert "optimizer. lr" in table, "where it may break"
    assert re.findall(r"\b(\d) unknown", table) == ["1", "2", "0"]
    for n, folder in enumerate(folders):
        (folder / "config.yaml").write_text("sweep: {metric: eval_accuracy, mode: auto}\n")
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 1, "eval_accuracy": [0.5, 0.25, 0.75][n]}) + "\n")
    table = page_of(*folders).text.partition("Runs, and what differs")[2].partition("Curves")[0]
    assert re.findall(r"\b(\d) unknown", table) == ["2", "0", "1"]
    for n, folder in enumerate(folders):
        name = ["Cosine", "Linear", "Linear"][n]
        text = f"steps: {n + 1}\nscheduler: {{_target_: trainer.optim.schedules.{name}}}\n"
        (folder / "config.yaml").write_text(f"{text}choices: {{scheduler: {name.lower()}}}\n")
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 1, "eval_f1": 0.125, "eval_seconds": 2.0}) + "\n")
    table = page_of(*folders).text.partition("Runs, and what differs")[2].partition("Curves")[0]
    head = "steps scheduler held-out loss held-out accuracy held-out f1 training loss steps done "
    head += "time tokens per second"
    assert table.partition("run state ")[2].startswith(f"{head} 1 unknown")
    assert "0.1250" in table
    for folder in folders:
        (folder / "config.yaml").write_text("sweep: {metric: eval_accuracy, mode: auto}\n")
    for n, folder in enumerate(folders):
        state = "failed" if n == 2 else "completed"
        (folder / "status.json").write_text(json.dumps({"state": state}))
    table = page_of(*folders).text.partition("Runs, and what differs")[2].partition("Curves")[0]
    assert re.findall(r"\b(\d) (?:failed|completed)", table) == ["0", "1", "2"], (
        "as a sweep's table"
    )


def test_figures_stand_together_where_they_are_of_the_same_held_out_tokens(tmp_path):
    runs = [
        finished(tmp_path / "worse", {"eval_loss": 2.0}, held_out="a", fingerprint="f"),
        finished(tmp_path / "better", {"eval_loss": 1.0}, held_out="a", fingerprint="f"),
        finished(tmp_path / "unknown", {"eval_loss": 0.5}),
    ]
    text = page_of(*runs).text
    assert "the best held-out loss first" in text
    assert text.index("unknown completed") < text.index("better completed")
    assert text.index("better completed") < text.index("worse completed")
    assert "training loss" in text
    assert "compare" not in text
    other = finished(tmp_path / "other", {"eval_loss": 0.1}, held_out="b", fingerprint="g")
    few = finished(tmp_path / "few", {"eval_loss": 0.2}, held_out="b", fingerprint="f")
    for run, most in ((other, 4), (few, 2)):
        (run / "config.yaml").write_text(f"eval: {{samples: {most}}}\n")
        (run / "plan.json").write_text(json.dumps({"num_held_out": 3, "tokenizer": "bpe"}))
    text = page_of(*runs, other, few).text
    assert "3 parts of other samples or tokens, that do not compare; the best" in text
    assert "On 3 held-out samples, tokenizer bpe" in text
    assert text.index("worse completed") < text.index("other completed")
    assert "Training losses are of different data, and left out" in text
    assert "training loss" not in text.partition("Curves")[0]


def configured(tmp_path, *configs, **terms):
    runs = []
    for n, config in enumerate(configs):
        figures = {"eval_loss": float(n)}
        runs.append(finished(tmp_path / str(n), figures, **terms))
        (runs[-1] / "config.yaml").write_text(json.dumps(config))
    return runs


def test_what_was_typed_and_changes_the_step_differs_first_and_few_keys_are_in_the_table(tmp_path):
    models = {"choices": {"model": "vit"}, "model": {"depth": 2, "size": 8}}
    other = {"choices": {"model": "resnet"}, "model": {"width": 4, "size": 9}}
    shared = [{f"k{k}": n for k in range(6)} for n in range(2)]
    rates = [{"optimizer": {"lr": n}, "log": {"every": n}, "name": str(n)} for n in range(2)]
    runs = configured(
        tmp_path,
        *(a | b | c for a, b, c in zip((models, other), shared, rates, strict=True)),
        contract={"optimizer.lr": 0},
    )
    for run in runs:
        (run / ".hydra").mkdir()
        (run / ".hydra" / "overrides.yaml").write_text("- log.every=1\n- optimizer.lr=1\n")
    found = Comparison([SavedRun(run) for run in runs])
    assert found.keys[:2] == ["optimizer.lr", "log.every"]
    assert {*found.keys[2:]} == {"model", "model.size", *(f"k{k}" for k in range(6))}
    assert found.word(0, "model") == "vit"
    assert len(found.shown_keys) == 6
    assert f"4 more keys that differ: {', '.join(found.other_keys)}" in page_of(*runs).text


def test_losses_of_other_objectives_are_named(tmp_path):
    runs = configured(tmp_path, *({"objective": {"label_smoothing": n}} for n in (0, 1)))
    text = page_of(*runs).text
    assert "Losses are of different objectives (objective.label_smoothing)." in text


def test_a_sweep_links_its_runs_and_draws_the_metric_against_each_key(tmp_path):
    keys = [
        {"optimizer": {"lr": lr}, "model": {"kind": kind}} for lr in (1e-3, 0.1) for kind in "ba"
    ]
    runs = configured(tmp_path, *keys)
    for run in runs:
        (run / ".hydra").mkdir()
        (run / ".hydra" / "overrides.yaml").write_text("- optimizer.lr=x\n- model.kind=x\n")
    (runs[1] / "report.html").touch()
    evil = runs[2].rename(tmp_path / "javascript:alert(1)")
    (evil / "report.html").touch()
    found = page_of(*runs[:2], evil, runs[3])
    assert found.links == ["1/report.html", "javascript%3Aalert%281%29/report.html"]
    by_lr, by_kind = json.loads(found.data)["swept"]
    assert (by_lr["key"], by_lr["words"]) == ("optimizer.lr", [])
    assert by_lr["points"] == [[0, 0.001, 0.0], [1, 0.001, 1.0], [2, 0.1, 2.0], [3, 0.1, 3.0]]
    assert (by_kind["key"], by_kind["words"]) == ("model.kind", ["a", "b"])
    assert by_kind["points"] == [[0, 1, 0.0], [1, 0, 1.0], [2, 1, 2.0], [3, 0, 3.0]]


def test_runs_are_compared_in_markdown_to_paste(tmp_path):
    runs = configured(tmp_path, {"note": "a|b <i>"}, {"note": "c"}, held_out="a")
    assert markdown(runs).splitlines() == [
        "### 2 runs, the best held-out loss first",
        "",
        "| run | state | note | held-out loss | training loss | steps done | time "
        "| tokens per second |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        r"| **0** | completed | a\|b \<i> | 0.0000 | 4.0000 | 1 | 500 ms | - |",
        "| 1 | completed | c | 1.0000 | 4.0000 | 1 | 500 ms | - |",
    ]
