"""Useful tokens per second of a chat fine-tuning, ours beside TRL and Hugging Face's Trainer.

    python benchmarks/sft.py [--steps 4] [--rounds 5] [--only ours,trl] [--device cpu] [--threads 2]
                             [--records 1024] [--hidden 256] [--layers 4] [--vocab 2048]
                             [--length 1024] [--json FILE]

`pip install '.[peers]' trl` for all rows; what is not installed is a row that says so. A GPU is
`--device cuda`: bf16 there, fp32 on a CPU, for every trainer.

The chat file is made of docstrings of the Python standard library: one to four questions a record,
answers as long as docstrings are, loss on the answers. All take the same optimizer steps of 64
records with the same Llama, weights, tokens, labels and AdamW, in one process; rounds are
interleaved. The clock runs from the first forward of a training to the end of its last step, so
that tokenising, packing rows and tuning are in none of the figures.

Padded, TRL and Hugging Face take micro-batches of 8 records, each padded to its own longest.
Packed, Hugging Face flattens 8 records (`DataCollatorWithFlattening`), and TRL fills rows of
`--length` tokens (`packing_strategy=bfd`), one a micro-batch and as many a step as hold the tokens
of 64 records. Both hold documents apart by `position_ids`, as ours does. TRL recomputes activations
by default, which is switched off here; the token accuracy and entropy that it logs are left as they
are. `ours` is what `accum=auto` does with the same records, tuned afresh.
"""

from __future__ import annotations

import argparse
import ast
import json
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from common import Figures, parser_of, print_table, write_results
from peers import Task, forget_accelerate
from ragged import GLOBAL, Setting, fresh_notebook, train_ours, watched
from torch.optim.lr_scheduler import LambdaLR

from trainer.assemble.build import assemble
from trainer.assemble.run_plan import prepare
from trainer.cli.compose import Composer
from trainer.cli.prepare import prepare_run
from trainer.core.world import World

TEMPLATE = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}"
    "{%- if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}"
    "{% endgeneration %}{{ '\\n' }}{%- else %}{{- m.content + '<|im_end|>\\n' }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
SPECIAL = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
OURS, OURS_PACKED = "ours", "ours packed"
SIZES = {"threads": 2, "hidden": 256, "layers": 4, "vocab": 2048}
MODULES = 400  # of the standard library, in order of their names


@final
@dataclass(frozen=True, kw_only=True)
class Bench:
    """A chat file, a tokenizer and a model in one folder, and our run on it, padded and packed."""

    folder: Path
    length: int
    device: str
    padded: Setting
    packed: Setting

    def trainers(self, only: Sequence[str]) -> dict[str, Callable[[Task], None]]:
        """List the trainers by name, in the order of the table."""
        every: dict[str, Callable[[Task], None]] = {
            OURS: lambda task: train_ours(self.padded, task),
            "trl": partial(trl, self),
            "hugging face": partial(hugging_face, self),
            OURS_PACKED: lambda task: train_ours(self.packed, task, packed=True),
            "trl packed": partial(trl, self, packed=True),
            "hugging face packed": partial(hugging_face, self, packed=True),
        }
        return {name: train for name, train in every.items() if not only or name in only}

    def arguments(self, task: Task) -> dict[str, Any]:
        """Give what TRL and Hugging Face are both told."""
        return {
            **peer_arguments(self.folder, task.micro, task.accum_steps, task.num_steps),
            "bf16": task.bf16,
            "use_cpu": self.device == "cpu",
            "logging_strategy": "no",
        }


def peer_arguments(folder: Path, micro: int, accum_steps: int, num_steps: int) -> dict[str, Any]:
    """Give what trainers of Hugging Face's kind are told of any training."""
    return {
        "output_dir": str(folder / "other"),
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": accum_steps,
        "max_steps": num_steps,
        "train_sampling_strategy": "sequential",
        "max_grad_norm": 0.0,
        "disable_tqdm": True,
        "report_to": "none",
        "save_strategy": "no",
    }


def hugging_face(bench: Bench, task: Task, *, packed: bool = False) -> None:
    """Train with `transformers.Trainer`."""
    import transformers  # noqa: PLC0415

    transformers.logging.set_verbosity_error()
    forget_accelerate()
    tokenizer = transformers.AutoTokenizer.from_pretrained(bench.folder / "model")
    collator = transformers.DataCollatorForSeq2Seq(tokenizer)
    if packed:
        collator = transformers.DataCollatorWithFlattening()
    trainer = transformers.Trainer(
        model=task.model,
        args=transformers.TrainingArguments(**bench.arguments(task)),
        data_collator=collator,
        train_dataset=[plain(document) for document in task.documents],
        optimizers=(task.optimizer, LambdaLR(task.optimizer, lambda _: 1.0)),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()


def trl(bench: Bench, task: Task, *, packed: bool = False) -> None:
    """Train with `trl.SFTTrainer` on the same tokens and labels."""
    import transformers  # noqa: PLC0415
    from datasets import Dataset, disable_progress_bars  # noqa: PLC0415
    from trl import SFTConfig, SFTTrainer, pack_dataset  # noqa: PLC0415

    transformers.logging.set_verbosity_error()
    disable_progress_bars()
    forget_accelerate()
    records = Dataset.from_list([plain(document) for document in task.documents])
    typed = bench.arguments(task)
    if packed:
        num_rows = len(pack_dataset(records, bench.length, "bfd"))
        rows = {"gradient_accumulation_steps": max(1, num_rows // task.num_steps)}
        typed |= {"per_device_train_batch_size": 1, **rows}
    trainer = SFTTrainer(
        model=task.model,
        args=SFTConfig(
            **typed,
            max_length=bench.length,
            packing=packed,
            gradient_checkpointing=False,
        ),
        train_dataset=records,
        processing_class=transformers.AutoTokenizer.from_pretrained(bench.folder / "model"),
        optimizers=(task.optimizer, LambdaLR(task.optimizer, lambda _: 1.0)),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()


def plain(document: Mapping[str, torch.Tensor]) -> dict[str, list[int]]:
    """Write a sample in lists."""
    return {name: document[name].tolist() for name in ("input_ids", "labels")}


def time_all(bench: Bench, only: Sequence[str], rounds: int) -> dict[str, dict[str, Any]]:
    """Time every trainer in turn; every round begins with another one."""
    trainers, setting = bench.trainers(only), bench.padded
    names, is_gpu = list(trainers), bench.device == "cuda"
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    of_records = sum(len(d["input_ids"]) for d in setting.task(setting.num_steps).documents)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            if "missing" in found[name]:
                continue
            own = bench.packed if name == OURS_PACKED else setting  # whose model attends otherwise
            try:
                watch = watched(trainers[name], own.task(setting.num_steps, bf16=is_gpu))
            except ImportError as error:
                found[name]["missing"] = f"not installed ({error.name})"
                continue
            assert watch.timing is not None
            # Rows of TRL may hold a little more or less than the records, and no padding.
            tokens = watch.positions if name == "trl packed" else of_records
            rate = found[name].setdefault("rate", Figures())
            rate.add(tokens / watch.timing.seconds, watch.timing)
            found[name]["padding"] = max(0.0, 1.0 - tokens / watch.positions)
            found[name]["tokens"] = tokens / setting.num_steps
            found[name]["micro_batches"] = watch.micro_batches / setting.num_steps
            print(f"  {name}: {tokens / watch.timing.seconds:.0f} tokens/s", flush=True)
    return found


def docstrings() -> Iterator[tuple[str, str]]:
    """Give names of functions and classes of the standard library, and what is said of them."""
    kinds = ast.FunctionDef, ast.ClassDef
    root = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(root.glob("*.py"))[:MODULES]:
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, kinds) and (text := ast.get_docstring(node)):
                yield f"{file.stem}.{node.name}", text


def write_files(folder: Path, arguments: argparse.Namespace) -> None:
    """Write the chat file, and a model with random weights beside a tokenizer of that text."""
    from tokenizers import (  # noqa: PLC0415
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
        trainers,
    )
    from transformers import (  # noqa: PLC0415
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
    )

    known = list(docstrings())
    draw = torch.Generator().manual_seed(0)
    with (folder / "chat.jsonl").open("w") as file:
        for _ in range(arguments.records):
            count = int(torch.randint(1, 5, (), generator=draw))
            picked = torch.randint(len(known), (count,), generator=draw).tolist()
            turns = [
                {"role": role, "content": text}
                for name, said in (known[i] for i in picked)
                for role, text in (("user", f"What does {name} do?"), ("assistant", said))
            ]
            file.write(json.dumps({"messages": turns}) + "\n")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=arguments.vocab,
        special_tokens=SPECIAL,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    bpe.train_from_iterator((text for _, text in known), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token=SPECIAL[0], eos_token=SPECIAL[2]
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=arguments.vocab,
        hidden_size=arguments.hidden,
        intermediate_size=4 * arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden // 64,
        num_key_value_heads=arguments.hidden // 64,
        max_position_embeddings=arguments.length,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")


def set_up(folder: Path, arguments: argparse.Namespace, *, packed: bool) -> Setting:
    """Build our run on the files, and tune it."""
    lines = [
        "model=hf",
        f"model.path={folder / 'model'}",
        "data=hf",
        f"data.path={folder / 'chat.jsonl'}",
        f"data.max_length={arguments.length}",
        "data.holdout=0",
        f"batch.global={GLOBAL}",
        "accum=auto",
        f"accum.packed={str(packed).lower()}",
        f"device={arguments.device}",
        f"precision={'bf16' if arguments.device == 'cuda' else 'fp32'}",
        "optimizer=adamw",
        "optimizer.lr=0.001",
        "scheduler=constant",
        "scheduler.warmup=0",
        "clip_norm=null",
        "steps=1000",
    ]
    config = prepare_run(lines, Composer()).config
    with fresh_notebook():
        run_plan = prepare(assemble(config, World(device=torch.device(arguments.device))))
    weights = run_plan.run.model.module.state_dict()
    return Setting(
        length=arguments.length, run_plan=run_plan, weights=weights, num_steps=arguments.steps
    )


def print_results(found: Mapping[str, Mapping[str, Any]]) -> None:
    """Print one table; each row beside ours of its kind."""
    rates = [row["rate"] for row in found.values() if "rate" in row]
    rows = []
    for name, row in found.items():
        if "missing" in row:
            rows.append((name, row["missing"], *[""] * 4))
            continue
        ours = found.get(OURS_PACKED if "packed" in name else OURS, {}).get("rate")
        rows.append(
            (
                name,
                row["rate"].show(".0f"),
                f"{ours.median / row['rate'].median:.2f}x" if ours else "",
                f"{row['padding']:.1%}",
                f"{row['micro_batches']:.1f}",
                f"{row['tokens']:.0f}",
            )
        )
    print(f"\nmedian (min-max) of {max(len(rate.values) for rate in rates)} rounds")
    print_table(("", "tokens/s", "ours is", "padding", "micro", "tokens/step"), rows)
    print(f"up to {max(rate.foreign for rate in rates):.0%} was used by other programs")


def main() -> None:
    """Measure, print the table, and write JSON."""
    numbers = {**SIZES, "steps": 4, "rounds": 5, "records": 1024, "length": 1024}
    parser = parser_of(__doc__, "sft", **numbers)
    parser.add_argument("--only", type=lambda text: text.split(","), default=[])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_files(folder, arguments)
        padded, packed = (set_up(folder, arguments, packed=way) for way in (False, True))
        for setting in (padded, packed):
            print(f"{setting.run_plan.how}", flush=True)
        bench = Bench(
            folder=folder,
            length=arguments.length,
            device=arguments.device,
            padded=padded,
            packed=packed,
        )
        found = time_all(bench, arguments.only, arguments.rounds)
    print_results(found)
    rows = {n: r | ({"rate": r["rate"].to_json()} if "rate" in r else {}) for n, r in found.items()}
    write_results(arguments.json, vars(arguments), rows)


if __name__ == "__main__":
    main()
