"""The commands of docs/text.md run as they stand, on small models and files."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.lib.cli_support import prepared
from tests.lib.hf_toys import save_job_files
from tests.lib.nightly import nightly
from tests.lib.run_support import shell

PAGE = (Path(__file__).parents[2] / "docs" / "text.md").read_text()
SHORT = (
    "steps=1 batch.global=4 eval.samples=4 accum=fixed accum.micro=4 device=cpu wandb.mode=disabled"
)


TRAINED_ELSEWHERE = {"data.path=chat.jsonl", "model.path=t5"} | {
    f"model.task={task}" for task in ("token_classification", "question_answering", "masked_lm")
}
"""What `test_hugging_face_steps`, `test_chat_jobs`, `test_adapter` and `test_transformers_models`
train: by default a command with one of these is checked alone."""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.usefixtures("own_folder")
@pytest.mark.parametrize("checked_alone", [TRAINED_ELSEWHERE, nightly(set())], ids=len)
def test_every_command_of_the_page_on_text_runs(checked_alone, capsys):
    import datasets  # noqa: PLC0415 - seconds, of every process that collects tests

    save_job_files()
    datasets.Dataset.from_json("pairs.jsonl").to_parquet("pairs.parquet")
    lines = [
        shlex.split(line, comments=True)[1:]
        for block in re.findall(r"^```sh\n(.*?)^```", PAGE, flags=re.M | re.S)
        for line in block.splitlines()
    ]
    assert len(lines) == 15
    for line in lines:
        reads_a_run = line[0] in {"evaluate", "export"}
        own = "" if reads_a_run else SHORT
        own += " model.width=16 model.num_layers=1 model.num_heads=2" * ("model=gpt_small" in line)
        typed = f"{shlex.join(line)} {own}"
        if line[0] != "plan" and checked_alone & set(line):
            prepared(typed)
        else:
            assert shell(typed) == 0, line
    shown = capsys.readouterr().out
    assert re.search(r"held out: .* f1 \d", shown)
    assert "<assistant>[[" in shown
    assert {"model.safetensors", "tokenizer.json"} <= {
        file.name for file in Path("tuned").iterdir()
    }
    (predictions,) = Path("outputs").glob("*/*/predictions.jsonl")
    first = json.loads(predictions.read_text().splitlines()[0])
    assert {"id", "loss"} <= first.keys()
