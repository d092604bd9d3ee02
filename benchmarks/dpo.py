"""Useful tokens per second of preference training, ours beside TRL's DPOTrainer, and both losses.

    python benchmarks/dpo.py [--steps 3] [--rounds 3] [--pairs 64] [--hidden 256] [--layers 4]
                             [--vocab 2048] [--length 512] [--threads 2] [--json FILE]

`pip install '.[hf]' trl` for both rows; without TRL its row says so. All is in fp32 on a CPU.

Pairs are made of docstrings of the Python standard library: the one that belongs to a name is the
chosen answer, another one the rejected. Both take the same steps of all pairs, with the same Llama,
weights, tokens and SGD, so that the order of pairs is none of the figures, and the losses of every
step are to agree. The clock runs over the steps alone; rounds are interleaved. TRL takes
micro-batches of 8 pairs, without recomputation; it computes entropies and accuracies of tokens,
too. `ours` is what `accum=auto` does.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import FOLDER, print_table, write_results
from sft import docstrings, write_files

from trainer import train

MICRO = 8  # pairs
RATE = 0.1


def write_pairs(folder: Path, count: int, length: int) -> int:
    """Write the pairs, none of which is too long; gives their tokens."""
    from transformers import AutoTokenizer  # noqa: PLC0415

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    known, tokens, lines = list(docstrings()), 0, list[str]()
    for i, (name, text) in enumerate(known):
        pair = {"prompt": f"What does {name} do?\n"}
        pair |= {"chosen": text, "rejected": known[(i + 7) % len(known)][1]}
        lengths = [
            len(tokenizer(pair["prompt"] + pair[side])["input_ids"]) + 1
            for side in ("chosen", "rejected")
        ]
        if max(lengths) <= length and len(lines) < count:
            lines.append(json.dumps(pair))
            tokens += sum(lengths)
    (folder / "pairs.jsonl").write_text("\n".join(lines))
    return tokens


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
    clock = Clock()

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
            output_dir=str(folder / "other"),
            per_device_train_batch_size=MICRO,
            gradient_accumulation_steps=max(1, arguments.pairs // MICRO),
            max_steps=arguments.steps,
            max_length=arguments.length,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            optim="sgd",
            max_grad_norm=0.0,
            gradient_checkpointing=False,
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
            report_to="none",
            save_strategy="no",
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, default=FOLDER / "dpo.json")
    arguments = parser.parse_args()
    arguments.records = 8
    torch.set_num_threads(arguments.threads)
    found: dict[str, dict[str, Any]] = {"ours": {"rates": []}, "trl": {"rates": []}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_files(folder, arguments)
        tokens = write_pairs(folder, arguments.pairs, arguments.length)
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
