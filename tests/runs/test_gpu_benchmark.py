"""The benchmark that waits for a GPU goes through its sections on a CPU, and each gives its rows.

Nightly every section; slow the one that counts how often a step waits.
"""

import json
import os
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from tests.lib.cli_support import CHECKOUT
from tests.lib.nightly import nightly, slow
from tests.reliability import lab

FIELDS = {
    "machine": {"torch", "gpu", "bf16_tflops"},
    "checks": {"exit_code", "took_s"},
    "windows": {"tokens_per_s", "mfu", "over_hand", "padding"},
    "documents": {"tokens_per_s", "mfu", "over_hand", "padding"},
    "chats": {"tokens_per_s", "padding"},
    "syncs": {"per_step", "places"},
    "graphs": {"graphs", "seconds_by_step"},
    "kernels": {"ms"},
    "long run": {"retries", "out_of_memory", "replays", "reserved_over_allocated"},
    "memory": {"predicted_bytes", "allocated_bytes", "off", "reserved_bytes"},
    "settings": {"tokens_per_s", "over_base", "mfu", "eval_s"},
    "sweep": {"tokens_per_s", "of_best", "cap"},
}
PEERS = "hf "
NEEDS_A_GPU = "tf32"


def benchmark(words: list[str], shown: Path) -> int:
    """Run the benchmark as a program, in a process that has imported what it needs."""
    folder = CHECKOUT / "benchmarks"
    os.chdir(CHECKOUT)
    sys.argv[:], sys.path[:0] = ["gpu.py", *words], [str(folder)]
    with shown.open("w") as screen, redirect_stdout(screen):
        runpy.run_path(str(folder / "gpu.py"), run_name="__main__")
    return 0


@pytest.mark.filterwarnings("ignore:.*(fork|torch.jit):DeprecationWarning")
@pytest.mark.parametrize("only", [slow(("syncs",)), nightly(tuple(FIELDS))])
def test_every_section_gives_its_rows(only, tmp_path):
    words = ["--dry-run", "--only", ",".join(only), "--out", str(tmp_path)]
    shown, log = tmp_path / "shown", tmp_path / "log"
    assert lab.fork(lambda: benchmark(words, shown), log).wait() == 0, log.read_text()
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert {row["section"] for row in rows} == set(only)
    for row in rows:
        assert row["device"] == "CPU, a dry run"
        reason = row.get("failed", "")
        is_absent = row["row"].startswith(PEERS) and reason.startswith("not installed")
        if not is_absent and NEEDS_A_GPU not in row["row"]:
            assert not reason, row
            assert row.keys() >= FIELDS[row["section"]], row
            assert not row.get("exit_code"), row
        assert f"\n{row['row']}" in shown.read_text()  # in the table, too
