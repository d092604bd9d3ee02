"""Useful tokens per second of preference training, ours beside TRL's DPOTrainer, and both losses.

    python benchmarks/dpo.py [--steps 3] [--rounds 3] [--pairs 64] [--hidden 256] [--layers 4]
                             [--vocab 2048] [--length 512] [--threads 2] [--json FILE]
                             [--loss sigmoid] [--folder FOLDER]

`pip install '.[hf]' trl` for both rows; without TRL its row says so. All is in fp32 on a CPU.

Pairs are made of docstrings of the Python standard library: the one that belongs to a name is the
chosen answer, another one the rejected. Both take the same steps of all pairs, with the same Llama,
weights, tokens and SGD, so that the order of pairs is none of the figures, and the losses of every
step are to agree. The clock runs over the steps alone; rounds are interleaved. TRL takes
micro-batches of 8 pairs, without recomputation; it computes entropies and accuracies of tokens,
too. `ours` is what `accum=auto` does.

`--loss` is `sigmoid`, `ipo` or `hinge`. `--folder` has a `model` and `pairs.jsonl` in place of
those that are made. The figures of tests/features/preferences/test_trl.py are so made again.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import parser_of, print_table, write_results
from sft import SIZES, docstrings, peer_arguments, write_files

from trainer import train

MICRO = 8  # pairs
RATE = 0.1


def lengths_of(folder: Path, pairs: Sequence[Mapping[str, str]]) -> list[list[int]]:
    """Count the tokens of both rows of each pair, with those that end them."""
    from transformers import AutoTokenizer  # noqa: PLC0415

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    found = list[list[int]]()
    for pair in pairs:
        rows = (pair["prompt"] + pair[side] for side in ("chosen", "rejected"))
        found.append([len(tokenizer(row)["input_ids"]) + 1 for row in rows])
    return found


def write_pairs(folder: Path, count: int, length: int) -> None:
    """Write the first pairs that are not too long."""
    known, pairs = list(docstrings()), list[dict[str, str]]()
    for i, (name, text) in enumerate(known):
        other = known[(i + 7) % len(known)][1]
        pairs.append({"prompt": f"What does {name} do?\n", "chosen": text, "rejected": other})
    sized = zip(pairs, lengths_of(folder, pairs), strict=True)
    lines = [json.dumps(pair) for pair, lengths in sized if max(lengths) <= length]
    (folder / "pairs.jsonl").write_text("\n".join(lines[:count]))


def ours(folder: Path, arguments: argparse.Namespace) -> tuple[list[float], float]:
    """Give the loss of each step, and the seconds of all."""
    run = train(
        [
            f"outputs={folder / 'outputs'}",
            "model=hf",
            f"model.path={folder / 'model'}",
            "data=hf",
            f"data.path={folder / 'pairs.jsonl'}",
            "data.holdout=0",
            f"data.max_length={arguments.length}",
            "objective=dpo",
            f"objective.loss={arguments.loss}",
            f"batch.global={arguments.pairs}",
            "optimizer=sgd",
            "optimizer.momentum=0",
            "optimizer.weight_decay=0",
            f"optimizer.lr={RATE}",
            "scheduler=constant",
            "scheduler.warmup=0",
            "clip_norm=null",
            "precision=fp32",
            "device=cpu",
            "logger=[]",
            f"steps={arguments.steps}",
        ]
    )
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").open()]
    steps = [line for line in lines if "loss" in line]
    return [step["loss"] for step in steps], sum(step["seconds"] for step in steps)


def trl(folder: Path, arguments: argparse.Namespace) -> tuple[list[float], float]:
    """Give the same of TRL's trainer."""
    import transformers  # noqa: PLC0415
    from datasets import disable_progress_bars, load_dataset  # noqa: PLC0415
    from trl import DPOConfig, DPOTrainer  # noqa: PLC0415

    transformers.logging.set_verbosity_error()
    disable_progress_bars()
    # A mean of means is that of all where each is of as many pairs.
    clock, micro = Clock(), math.gcd(MICRO, arguments.pairs)

    class Watch(transformers.TrainerCallback):
        """Times the steps."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:  # noqa: ANN401
            clock.begin = time.perf_counter()

        def on_train_end(self, *_: Any, **__: Any) -> None:  # noqa: ANN401
            clock.seconds = time.perf_counter() - clock.begin

    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    trainer = DPOTrainer(
        model=model,
        args=DPOConfig(
            **peer_arguments(folder, micro, arguments.pairs // micro, arguments.steps),
            max_length=arguments.length,
            loss_type=arguments.loss,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            optim="sgd",
            gradient_checkpointing=False,
            use_cpu=True,
            bf16=False,
            logging_steps=1,
        ),
        train_dataset=load_dataset(
            "json", data_files=str(folder / "pairs.jsonl"), cache_dir=str(folder / "cache")
        )["train"],
        processing_class=transformers.AutoTokenizer.from_pretrained(folder / "model"),
        callbacks=[Watch()],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line], clock.seconds


class Clock:
    """When the steps began, and how long they took."""

    begin = seconds = 0.0


def main() -> None:
    """Measure, print the table, and write JSON."""
    numbers = {**SIZES, "steps": 3, "rounds": 3, "pairs": 64, "length": 512}
    parser = parser_of(__doc__, "dpo", **numbers)
    parser.add_argument("--loss", default="sigmoid")
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    found: dict[str, dict[str, Any]] = {"ours": {"rates": []}, "trl": {"rates": []}}
    with tempfile.TemporaryDirectory() as name:
        folder, arguments.records = Path(name), 8
        if arguments.folder:
            shutil.copytree(arguments.folder, folder, dirs_exist_ok=True)
        else:
            write_files(folder, arguments)
            write_pairs(folder, arguments.pairs, arguments.length)
        pairs = [json.loads(line) for line in (folder / "pairs.jsonl").open()]
        tokens = sum(map(sum, lengths_of(folder, pairs)))
        for number in range(arguments.rounds):
            pair = [("ours", ours), ("trl", trl)]
            for key, measure in pair[:: 1 - 2 * (number % 2)]:
                try:
                    found[key]["losses"], seconds = measure(folder, arguments)
                    found[key]["rates"].append(tokens * arguments.steps / seconds)
                except ImportError as error:
                    found[key]["missing"] = f"not installed ({error.name})"
    rows = []
    for key, row in found.items():
        if "missing" in row:
            rows.append((key, row["missing"], ""))
            continue
        losses = " ".join(f"{loss:.7f}" for loss in row["losses"])
        rates = row["rates"]
        rows.append((key, f"{median(rates):.0f} ({min(rates):.0f}-{max(rates):.0f})", losses))
    print_table(("", "tokens/s, median (min-max)", "loss of each step"), rows)
    write_results(arguments.json, vars(arguments), found)


if __name__ == "__main__":
    main()
