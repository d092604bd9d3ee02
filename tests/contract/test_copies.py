"""A verbatim copy of any built-in plug does what the original does: no part is known by address.

Every module that an option of `conf/` names is copied into the user's folder under another name,
and every option into their `--config-dir`, with `_target_` pointing to the copy.
"""

import ast
import hashlib
import importlib
import re
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.lib.config_support import CONF
from tests.lib.nightly import nightly
from tests.lib.run_support import TOYS, entries, read_json, small_library, state
from trainer import train
from trainer.core.errors import TrainError

GROUPS = ("accum", "accum/gradient", "batch", "data", "model", "objective", "optimizer")
GROUPS += ("scheduler", "sync")
COPY = "_copy"
BASES = {"BatchSize", "OptimizerSpec", "Schedule", "SyncPolicy"}
SMALL = (
    "deterministic=true epochs=null steps=2 eval.every=null checkpoint.every=null device=cpu "
    "precision=fp32 wandb.mode=disabled log.samples=true"
)
TINY = (
    "model.width=16 model.num_heads=2 model.num_layers=1 model.max_length=32 model.vocab_size=2000"
)
SIXTEEN = "data.max_length=16 batch.global=8"
VISION = f"model._target_={TOYS}.Vision data._target_={TOYS}.Images batch.global=8"
RUNS: list[str] = [
    f"model=gpt_tiny data=stdlib objective=next_token accum=auto optimizer=adamw scheduler=cosine "
    f"batch=samples accum/gradient=sum sync=overlapped scheduler.warmup=1 {TINY} {SIXTEEN} "
    "optimizer.lr=0.012",
    f"model=gpt_small data=text data.path=corpus.txt objective=token_classify accum=budget "
    f"accum.max_tokens=64 optimizer=sgd scheduler=wsd scheduler.warmup=1 batch=tokens "
    f"sync=immediate {TINY} data.max_length=16 batch.global=100 optimizer.lr=0.01",
    f"objective=classify accum=fixed accum.steps=2 scheduler=constant sync=hierarchical {VISION}",
    f"model=gpt_tiny data=text data.path=corpus.txt accum=auto sync=deferred {TINY} "
    f"{SIXTEEN} parallel.ranks=2 parallel=fsdp",
]
"""The first has an option of every group; the others have most of the rest."""
MISTAKES = (
    "model.dropout=2 data.max_length=1 objective.label_smoothing=-1 optimizer.weight_decay=x "
    "scheduler.warmup=-3 accum.micro=0 batch.global=0 accum.gradient.odd=1 sync.odd=1 batch.odd=1"
)


def with_base_of(module: str, source: str) -> str:
    """Import the base class of plugs where it stands in their file: it is no plug itself."""
    lines = source.splitlines()
    for node in ast.parse(source).body[::-1]:
        if isinstance(node, ast.ClassDef) and node.name in BASES:
            first = min(each.lineno for each in (node, *node.decorator_list)) - 1
            lines[first : node.end_lineno] = [f"from {module} import {node.name}"]
    return "\n".join([*lines, ""])


@pytest.fixture(autouse=True)
def copies(own_folder: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy every plug into the current folder, beside data to read."""
    for group in GROUPS:
        for file in (CONF / group).glob("*.yaml"):
            target = yaml.safe_load(file.read_text()).get("_target_")
            if target is None:
                continue
            module, _, name = target.rpartition(".")
            source = Path(importlib.import_module(module).__file__).read_text()
            own = f"{module.rpartition('.')[2]}{COPY}"
            Path(f"{own}.py").write_text(with_base_of(module, source))
            option = Path("my_conf", group, f"{file.stem}{COPY}.yaml")
            option.parent.mkdir(parents=True, exist_ok=True)
            option.write_text(file.read_text().replace(target, f"{own}.{name}"))
    small_library(monkeypatch)
    # The copy of the data set has a `sysconfig` of its own.
    library, get_path = str(Path("library").absolute()), sysconfig.get_path

    def stand_in(name: str, *more: Any) -> str | None:
        return library if name == "stdlib" else get_path(name, *more)

    monkeypatch.setattr(sysconfig, "get_path", stand_in)
    Path("corpus.txt").write_text("\n\n".join(f"Line {i} of {i % 7}" * 2 for i in range(60)))


def copied(line: str) -> list[str]:
    """Choose the copy of every option."""
    return [f"{each}{COPY}" if each.partition("=")[0] in GROUPS else each for each in line.split()]


def comparable(text: str) -> str:
    """Leave out names, and what differs from run to run: times, rates, memory that is free."""
    text = text.replace(COPY, "")
    text = re.sub(r"outputs/\S+|\d\d-\d\d-\d\d-\d+", "FOLDER", text)
    text = re.sub(r"steps, .*? after the start", "steps", text)
    text = re.sub(r"[\d.,]+k? (tokens/s|samples/s|ms|s)\b|\d+:\d\d:\d\d", "TIME", text)
    text = re.sub(r"[\d.]+% of [\d.]+ .iB|[\d.]+ .iB at the peak|(data|compute).*%", "SIZE", text)
    return re.sub(r"[\s─]+", " ", text)


def outcome(lines: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[Any, ...]:
    """Run, and give plan, screen, steps and tensors; or the error, a line for each fault."""
    try:
        typed = {each.partition("=")[0]: each for each in (*SMALL.split(), *lines)}  # the last wins
        run = train([*typed.values()], config_dir="my_conf")
    except TrainError as error:
        return ([comparable(fault) for fault in str(error).splitlines()],)
    plan = read_json(run.folder / "plan.json")
    plan |= {"memory_limit_bytes": None, "step_seconds": None}
    timed = {"seconds", "tokens_per_second", "memory_bytes", "eval_seconds"}
    timed |= {"model_flops_per_second"}
    steps = [{k: v for k, v in e.items() if k not in timed} for e in entries(run)]
    tensors = {
        name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
        for name, tensor in state(run).items()
    }
    screen = capsys.readouterr()
    return comparable(str(plan)), comparable(screen.out), comparable(screen.err), steps, tensors


def differences(ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> list[set[str]]:
    """Give what only one of the two has, from comma to comma."""
    parts = [[set(re.split(", |: ", str(each))) for each in all] for all in (ours, theirs)]
    return [mine ^ other for mine, other in zip(*parts, strict=True) if mine != other]


@pytest.mark.parametrize("line", [RUNS[0], *map(nightly, RUNS[1:])])
def test_a_copy_gives_the_same_plan_screen_messages_and_bits(line, capsys):
    ours, theirs = (outcome(each, capsys) for each in (line.split(), copied(line)))
    assert len(ours) > 1, ours
    assert differences(ours, theirs) == []
    (faults,), (answer,) = (
        outcome([*each, *MISTAKES.split()], capsys) for each in (line.split(), copied(line))
    )
    assert faults == answer
    assert len(faults) > 1
