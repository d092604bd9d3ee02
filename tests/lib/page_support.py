"""Folders of runs with records as they are written, and their page, parsed strictly."""

import json
import re
from html.parser import HTMLParser

from trainer.features.page.page import write_page

VOID = {"input", "meta", "br", "img", "wbr"}


class Page(HTMLParser):
    """Parses a page strictly: every tag is closed in order, and nothing is fetched."""

    def __init__(self, text):
        super().__init__()
        self.open, self.texts, self.links, self.data = [], [], [], ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        assert tag not in {"link", "iframe", "object", "embed"}
        for name, value in attrs:
            assert not name.startswith("on")
            assert name != "srcset"
            # A picture is in the page; a link leads to a run's own page.
            if name == "src":
                assert (tag, value[:22]) == ("img", "data:image/png;base64,")
            if name == "href":
                assert (tag, value[-11:]) == ("a", "report.html")
                assert ":" not in value
                self.links.append(value)
        self.open += [] if tag in VOID else [tag]

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
    "precision": "bf16",
    "model": "gpt_tiny",
    "num_parameters": 1200,
    "num_frozen": 34,
    "data": "stdlib",
    "num_held_out": 9,
    "objective": "next_token, as typed",
    "normalizer": "tokens",
    "optimizer": "adamw",
    "optimizer_defaults": {"betas": [0.9, 0.95]},
    "lr": 0.012,
    "scheduler": "cosine",
    "warmup_steps": 1,
    "git": {"commit": "abc123", "changed_files": 2},
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


def finished(folder, figures, state="completed", **terms):
    """A run that ended with these figures, and a checkpoint with some terms."""
    run = saved(folder, [entry(1), {"step": 1, **figures}], status={"state": state})
    checkpoint = run / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    parts = {"terms": {"state": terms}}
    (checkpoint / "manifest.json").write_text(json.dumps({"parts": parts}))
    return run
