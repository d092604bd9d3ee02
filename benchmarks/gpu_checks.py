"""Run commands on a GPU as users do, several at a time: whether they work, not how fast they are.

Each is a process of its own, whose output goes into a file. What it needs is made on the spot.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gpu_run import Bench, Fields

TOGETHER = 8
"""Commands at a time."""

CHECKOUT = Path(__file__).parents[1]

TOKENS = "data=tokens data.dtype=uint16 data.path=tokens.bin"
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 50_304,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
}
GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
MODELS = {"gpt2": GPT2, "llama": LLAMA}

COMMANDS: Mapping[str, str] = {
    "tests/gpu": "-m pytest -q -n 6 -m gpu -p no:cacheprovider -p no:benchmark -o addopts= "
    "tests/gpu",
    "README's command": "train batch.global=512 accum=auto name=first",
    "verify gpt2": f"train verify model=hf model.config=gpt2 {TOKENS} data.max_length=512 "
    "batch.global=16 precision=bf16 accum=fixed accum.micro=4",
    "verify a Llama": f"train verify model=hf model.config=llama {TOKENS} data.max_length=512 "
    "batch.global=16 precision=bf16 accum=fixed accum.micro=4",
    "verify matrix, gpt_tiny": "train verify matrix=true model=gpt_tiny batch.global=16",
    "verify matrix, a Llama": f"train verify matrix=true model=hf model.config=llama {TOKENS} "
    "data.max_length=128 batch.global=16",
    "verify matrix, resnet": "train verify matrix=true model=resnet data=digits batch.global=32",
    "fsdp": "-m torch.distributed.run --standalone --nproc-per-node=1 -m trainer parallel=fsdp "
    "batch.global=64 steps=6 name=sharded",
    "ddp": "-m torch.distributed.run --standalone --nproc-per-node=1 -m trainer parallel=ddp "
    "batch.global=64 steps=6 compile=true",
    "muon": "train optimizer=muon batch.global=64 steps=6 ema.decay=0.9 ema.evaluate=true",
    "fp16": "train precision=fp16 batch.global=64 steps=8",
    "tf32": "train precision=tf32 batch.global=64 steps=8 activation_checkpointing=true",
    "batch norm": "train model=resnet data=digits batchnorm=ghost batch.global=128 steps=20",
    "vision": "train model=vit data=digits batch.global=128 steps=20 compile=true",
    "contrastive": "train recipe=two_towers trust=[recipes] steps=4",
    "plan": f"train plan model=gpt2 {TOKENS} batch.global=512 device=h200",
    "doctor": "train doctor",
    "evaluate": "train evaluate run=first",
    "generate": "train generate run=first prompt=import",
    "resume": "train resume=first steps=34",
    "export": "train export run=first export.to=exported",
}
"""What is run: one of them alone, then the others, and those that need its run."""

FIRST = "README's command"
AFTER_FIRST = ("evaluate", "generate", "resume", "export")

OF_DRY_RUN = ("tests/gpu", "plan", "doctor", "muon")


def checks(bench: Bench) -> Iterator[tuple[str, float, object]]:
    """Whether the tests, README's command, `train verify`, and options one by one work."""
    yield "commands", 90, lambda: run_all(bench, bench.folder / "checks")


def run_all(bench: Bench, folder: Path) -> list[tuple[str, Fields]]:
    """Run all commands; gives a row for each."""
    folder.mkdir()
    _write_inputs(bench, folder)
    found: dict[str, Fields] = {}

    def run(name: str) -> None:
        found[name] = _run(bench, folder, name)

    every = COMMANDS if bench.scale.is_gpu else OF_DRY_RUN
    taken = [name for name in every if any(part in name for part in bench.commands)]
    for names in ((FIRST,), [n for n in taken if n not in {FIRST, *AFTER_FIRST}], AFTER_FIRST):
        with ThreadPoolExecutor(TOGETHER if bench.scale.is_gpu else 1) as pool:
            list(pool.map(run, [name for name in names if name in taken]))
    for plan in folder.glob("outputs/*/*-first/plan.json"):
        shutil.copy(plan, bench.logs / "readme-plan.json")
    return [(name, found[name]) for name in taken]


def _write_inputs(bench: Bench, folder: Path) -> None:
    (folder / "tokens.bin").symlink_to(bench.folder / "small.bin")
    tokens = (bench.folder / "tokens.bin").read_bytes()[: 2 * 400_000]
    (bench.folder / "small.bin").write_bytes(tokens)
    for name, config in MODELS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))


def _run(bench: Bench, folder: Path, name: str) -> Fields:
    first, *rest = COMMANDS[name].split()
    module = ["-m", "trainer"] if first == "train" else [first]
    rest = [f"{CHECKOUT / each}" if each == "tests/gpu" else each for each in rest]
    log = bench.logs / f"{name.replace(' ', '-').replace('/', '-')}.log"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(CHECKOUT), os.environ.get("PYTHONPATH", "")]),
        "WANDB_MODE": "disabled",
        "COLUMNS": "150",
    }
    environment.pop("TRAIN_BRIEF", None)  # which `prepare_process` set
    began = time.monotonic()
    with log.open("w") as file:
        try:
            done = subprocess.run(
                [sys.executable, *module, *rest],
                cwd=CHECKOUT if name == "tests/gpu" else folder,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=max(1.0, min(110.0, bench.left_s)),
                check=False,
            )
            code: int | str = done.returncode
        except subprocess.TimeoutExpired:
            code = "took too long"
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    took = round(time.monotonic() - began, 1)
    return {"exit_code": code, "took_s": took, "last line": lines[-1][:160] if lines else ""}
