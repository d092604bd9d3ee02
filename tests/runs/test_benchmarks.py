"""Each benchmark runs, tiny, and its table has rows with figures."""

import re

import pytest

from tests.lib.cli_support import CHECKOUT, python
from tests.lib.nightly import LIMIT_S, nightly

SMALL = "--width 32 --layers 1"
TINY = f"--global-batch 4 --max-length 64 --rounds 1 {SMALL}"
DEFAULT = "balance ranks=2 per_rank=4 batches=2 json=x.json"
# Of each: what is typed, how rows begin, and how many figures are in each.
LINES = {
    DEFAULT: (("ours", "dealt by cost"), 6),
    f"auto {TINY}": (("in order, 2 a piece",), 4),
    "balance planning=64 ranks=1,2 batches=1 json=x.json": (("1 ranks", "2 ranks"), 2),
    "batchnorm --epochs 1 --seeds 1 --cells 'micro, 32'": (("micro, 32",), 6),
    "buffers": (("float32   native", "bfloat16  native", "bfloat16  fp32"), 3),
    "contrastive --batches 4": (("4 .*one pass", "4 .*two passes"), 3),
    f"cpu precision {TINY}": (("precision=bf16 ",), 3),
    "dpo --steps 2 --rounds 1 --pairs 8 --hidden 64 --layers 1 --vocab 300 --length 64": (
        *(("ours",), 5),
    ),
    "loop --rounds 1 --steps 1 --threads 1": (("1", "8", "32"), 6),
    "noise --tasks digits --batches 64 256 --rates 2": (("digits +64", "digits +256"), 6),
    f"ragged --lengths 64 --exact 64 --trained 1 --steps 1 --rounds 1 {SMALL}": (
        *(("ours {2}", "no padding {2}", "hand loop {2}"), 4),
    ),
    "ranks --ranks 2,4 --repeats 1": (("2 ranks", "4 ranks"), 6),
    "scale --sizes 1e4 --ragged 1e4": (("vectors", "ragged", "ragged, tokens"), 10),
    "sft --steps 1 --rounds 1 --records 64 --hidden 128 --layers 1 --vocab 300 --length 64": (
        *(("ours {2}",), 3),
    ),
    "startup --rounds 1": (("train --help", "config error", "first step, no W&B"), 1),
    "sync --width 64 --depth 4 --rows 4 --steps 2 --repeats 1": (
        *(("none", "ddp +deferred", "fsdp +immediate"), 1),
    ),
    "verify --kinds causal_lm --only GPT2": (("truths: .*exact.: 1", "crashed: 0"), 1),
}
ELSEWHERE = {path.stem for path in (CHECKOUT / "benchmarks").glob("gpu*.py")}
PARTS = {"common", "peers", "verify_models", "verify_samples", "verify_truth"}


def test_every_benchmark_is_run():
    files = {path.stem for path in (CHECKOUT / "benchmarks").glob("*.py")}
    assert files == {*(line.split()[0] for line in LINES), *ELSEWHERE, *PARTS}


@pytest.mark.parametrize("typed", [DEFAULT, *(nightly(line) for line in LINES if line != DEFAULT)])
def test_a_benchmark_prints_its_table(typed, tmp_path):
    name, _, words = typed.partition(" ")
    done = python(f"{CHECKOUT}/benchmarks/{name}.py {words}", tmp_path, LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert "nan" not in done.stdout
    rows, num_figures = LINES[typed]
    for begin in rows:
        row = re.search(rf"^ *{begin}(?=\W)(.*)$", done.stdout, re.MULTILINE)
        assert row, done.stdout
        assert len(re.findall(r"\d[\d.,]*", row[0])) >= num_figures, row[0]
