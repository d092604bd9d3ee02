"""Where weights are loaded and no `batch.global` is typed, its default follows the data."""

from pathlib import Path

import pytest

from tests.lib.hf_toys import save_llama, save_tokenizer, write_lines
from tests.lib.run_support import read_json
from trainer import train

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
LINE = (
    "model=hf data=hf data.path=corpus.jsonl data.holdout=0 accum=fixed accum.micro=16 device=cpu"
)


@pytest.fixture(autouse=True)
def model(own_folder):
    save_llama(Path("model"), 300)
    save_tokenizer(Path("model"))


def write(num_records: int) -> None:
    write_lines(Path("corpus.jsonl"), [{"text": f"{i % 7}"} for i in range(num_records)])


def plan_of(line: str) -> dict:
    return read_json(train(["command=plan", *f"{LINE} {line}".split()]).folder / "plan.json")


@pytest.mark.parametrize(("num_records", "size"), [(6, 8), (5925, 32)])
def test_an_epoch_has_100_steps_if_it_can_and_the_start_says_why(num_records, size, capfd):
    """By a power of two from 8 to 128."""
    write(num_records)
    plan = plan_of("model.path=model")
    assert plan["global_batch"] == size
    assert f"batch.global={size}" in plan["defaults"]
    shown = " ".join(capfd.readouterr().out.split())
    assert "for 100 steps an epoch, as weights are loaded" in shown


def test_what_is_typed_and_what_begins_at_random_stay():
    write(600)
    assert plan_of("model.path=model batch.global=512")["global_batch"] == 512
    assert plan_of("model.path=model accum.steps=3")["global_batch"] == 48
    scratch = plan_of("model.config=model/config.json tokenizer=hf tokenizer.path=model")
    assert scratch["global_batch"] == 512
    assert not [each for each in scratch["defaults"] if each.startswith("batch")]
