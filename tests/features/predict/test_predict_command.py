"""`train predict`: what a run predicts of data without labels, in files that can be joined."""

import csv
import json
from pathlib import Path

import pytest
import torch
import transformers

from tests.lib.hf_toys import TEXTS, save_job_files
from tests.lib.run_support import TOYS, go, shell, state
from tests.lib.run_toys import DoubleNet, Rows
from trainer import train
from trainer.cli.python_api import FinishedRun

HEAD = ["Nr.", "prediction", "text", "a note, long"]


def predicted(run: FinishedRun, line: str) -> tuple[Path, list[dict[str, object]]]:
    """Predict; gives the file that was written, and its lines."""
    made = train(["predict", f"run={run.folder}", "trust=[tests]", *line.split()])
    file = Path(made.result["file"])
    assert file.parent == run.folder
    return file, [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_table_comes_back_with_a_column_for_the_class(capsys):
    save_job_files("bert")
    line = "model=hf model.path=bert model.task=sequence_classification data=hf"
    run = go(
        f"{line} data.path=reviews.csv data.filter={{label:[good,bad]}} batch.global=16 steps=2"
    )
    rows = [[f"{i:03}", "NA", text, 'she said "a;b",\nand left'] for i, text in enumerate(TEXTS)]
    rows[4][2] = " "
    ended = capsys.readouterr().out
    assert "\n  train predict run=outputs/" in ended
    assert "train generate" not in ended
    with Path("new.csv").open("w", newline="") as file:
        csv.writer(file).writerows([HEAD, *rows])
    path, lines = predicted(run, "data.path=new.csv")
    shown = " ".join(capsys.readouterr().out.split())
    assert "data: texts to label (text), not read: Nr., prediction, a note, long" in shown
    assert "no prediction for 1 record: its text is empty (1); the first is new.csv:10" in shown
    assert "59 predictions written to " in shown
    assert "new.csv:2: " in shown
    assert "in place of earlier ones" not in shown

    with path.with_suffix(".csv").open(newline="") as file:
        head, *table = csv.reader(file)
    assert head == [*HEAD, "prediction_2", "probability", "error"]
    assert [row[:4] for row in table] == rows
    assert table[4][4:] == ["", "", "its text is empty"]
    for line, row in zip(lines, table, strict=True):
        assert row[4] == (line["prediction"] or "")
    assert [line["id"] for line in lines] == [*range(60)]
    assert lines[1]["source"] == "new.csv:4"

    Path("bad.csv").write_bytes(b"text,note\nsums\ntext,a\nsums,b,c\nr\xe9d,d\n")
    path, _ = predicted(run, "data.path=bad.csv")
    with path.with_suffix(".csv").open(newline="", errors="replace") as file:
        cells = [row[:2] for row in csv.reader(file)]
    assert cells[1:] == [["sums", ""], ["text", "a"], ["sums", "b,c"], ["r\ufffdd", "d"]]

    # The filter of the run chose from its own data; one that is typed chooses.
    _, some = predicted(run, "data.path=reviews.csv data.filter={label:good}")
    assert [line["id"] for line in some] == [
        i for i, text in enumerate(TEXTS) if len(text) % 2 == 0
    ]

    assert shell(f"export run={run.folder} export.to=tuned") == 0
    model = transformers.AutoModelForSequenceClassification.from_pretrained("tuned").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained("tuned")
    for line, row in zip(lines[:3], rows, strict=False):
        with torch.no_grad():
            chances = model(**tokenizer(row[2], return_tensors="pt")).logits.softmax(-1)[0]
        named = {model.config.id2label[i]: chance for i, chance in enumerate(chances.tolist())}
        assert line["probabilities"] == pytest.approx(named, rel=1e-5)
        assert line["prediction"] == max(named, key=named.get)


class Bare(Rows):
    """Rows as they are predicted: without labels, where none are asked for."""

    label_names = tuple(f"token {i}" for i in range(16))

    def __init__(self, size: int = 44, learns: bool = True) -> None:
        super().__init__(size)
        self.learns = learns

    def __getitem__(self, index):
        sample = dict(super().__getitem__(index))
        if not self.learns:
            del sample["labels"]
        return sample


def test_data_of_ones_own_need_no_labels_and_sizes_of_steps_do_not_matter():
    run = go(
        f"model._target_={TOYS}.DoubleNet data._target_={__name__}.Bare objective=token_classify "
        "steps=2 ema.decay=0.5 checkpoint.every=1"
    )
    path, lines = predicted(run, "data.size=9 accum.micro=4 accum.steps=5 batch.global=3")
    data, model = Bare(9, learns=False), DoubleNet()
    model.load_state_dict({n[6:]: t for n, t in state(run).items() if n.startswith("model.")})
    assert [line["id"] for line in lines] == [*range(9)]
    for line in lines:
        with torch.no_grad():
            best, classes = model(data[line["id"]]["input_ids"][None])[0].softmax(-1).max(-1)
        assert line["prediction"] == [Bare.label_names[i] for i in classes]
        assert line["probability"] == pytest.approx(best.tolist(), rel=1e-6)
    averaged, others = predicted(run, "data.size=9 step=ema")
    assert others != lines
    names = {averaged.name}
    for settings in ("", "step=1", "precision=bf16", "log.generate_tokens=2"):
        names.add(predicted(run, f"data.size=9 {settings}")[0].name)
    assert len(names) == 5
    assert path.name in names
    assert "-step2-" in path.name
    assert "-step2-ema-" in averaged.name
    assert predicted(run, "data.size=9 batch.global=2")[0] == path
