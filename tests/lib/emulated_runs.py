"""Train on a CPU and on the emulated GPU, each kind of run in turn, and write what came of both.

`python -m tests.lib.emulated_runs results.json KIND ...`, in an empty folder.
"""

import itertools
import json
import re
import sys
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.lib import emulated_gpu  # ahead of the trainer, of which it is the GPU
from tests.lib.emulated_kinds import KINDS
from tests.lib.hf_toys import TEXTS, save_job_files, save_llama, save_tokenizer, write_lines
from tests.lib.run_support import entries
from trainer import train

RUN = (
    "steps=4 eval.every=null checkpoint.every=null precision=fp32 num_workers=0 "
    "seed=3 wandb.mode=disabled optimizer.lr=0.01 scheduler.warmup=0"
)


class Waits:
    """Counts, by a hook, the waits between a step and the next."""

    taken: list[dict[str, int]]

    def __init__(self) -> None:
        Waits.taken = []

    def on_step(self, entry: Mapping[str, Any]) -> None:
        Waits.taken.append(dict(emulated_gpu.WAITS))


def run(line: str, device: str) -> dict[str, Any]:
    """Train; gives the entries of metrics.jsonl and, the waits between steps."""
    default = "" if "batch.stages" in line else "batch.global=8"
    typed = {each.partition("=")[0]: each for each in f"{RUN} {default} {line}".split()}
    hook = ["hooks=[tests.lib.emulated_runs.Waits]"]
    emulated_gpu.WAITS.clear()
    done = train([*typed.values(), f"device={device}", *hook])
    between = [growth(*pair) for pair in itertools.pairwise(Waits.taken)]
    at_the_end = growth(Waits.taken[-1], emulated_gpu.WAITS)
    return {"entries": entries(done), "waits": between, "waits_at_the_end": at_the_end}


def growth(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """Give what was counted in between, by place."""
    return {k: n - before.get(k, 0) for k, n in after.items() if n > before.get(k, 0)}


def main(results: Path, kinds: list[str]) -> None:
    """Write what came of each kind on both devices, or the traceback of what failed."""
    warnings.simplefilter("ignore")
    lines = [KINDS[kind] for kind in kinds]
    named = {name for line in lines for name in re.findall(r"model\.path=(\w+)", line)}
    if named:
        save_job_files(*(named - {"deep"}))
    else:
        write_lines(Path("corpus.jsonl"), [{"text": text} for text in TEXTS])
    if "deep" in named:
        save_llama(Path("deep"), num_hidden_layers=3)
        save_tokenizer(Path("deep"))
    for config in Path().glob("*/config.json"):  # dropout, which the device draws otherwise
        content = json.loads(config.read_text())
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout_rate"):
            content[name] = 0
        config.write_text(json.dumps(content))
    found: dict[str, Any] = {}
    for kind in kinds:
        try:
            found[kind] = {device: run(KINDS[kind], device) for device in ("cpu", "auto")}
        except Exception:
            found[kind] = {"failed": traceback.format_exc()}
    results.write_text(json.dumps(found))


if __name__ == "__main__":
    # By its full name: the hook of the config is looked up there.
    from tests.lib import emulated_runs

    emulated_runs.main(Path(sys.argv[1]), sys.argv[2:])
