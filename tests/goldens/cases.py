"""The command lines of the goldens, and the files they are typed beside."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Line:
    """One command.

    Attributes:
        typed: what follows `train`; `{run}` is the newest run folder.
        launcher: a module that starts `trainer`, with its own arguments, instead.
        environment: variables besides.
        signal_after: steps after which a signal is sent; 0 sends none.
        signal_number: which.
    """

    typed: tuple[str, ...]
    launcher: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    signal_after: int = 0
    signal_number: int = 0


@dataclass(frozen=True)
class Case:
    """Commands typed one after the other in one folder.

    Attributes:
        exact: whether losses and weights are the same bits in every recording; not where a cut
            follows from timings.
    """

    name: str
    lines: tuple[Line, ...]
    exact: bool = True


def typed(line: str, **changes: object) -> Line:
    """Split a line at blanks; no word of the goldens holds one."""
    return Line(tuple(line.split()), **changes)  # type: ignore[arg-type]


QUIET = " wandb.mode=disabled device=cpu log.samples=true"
OWN = "model._target_=mine.Net data._target_=mine.Lines data.path=lines.txt batch.global=16 "
SHAPE = "model.width=32 model.num_heads=2 model.num_layers=2 "
SMALL = f"{SHAPE}data.max_length=64 batch.global=16 steps=4 "
TEXT = f"data=text data.path=lines.txt data.max_length=48 {SHAPE}"
FIXED = "accum=fixed accum.micro=5 "
IMAGES = "model._target_=mine.Conv data._target_=mine.Rings batch.global=32 "


def one(name: str, line: str, *then: str, exact: bool = True) -> Case:
    """Make a case of lines that train a little, quietly."""
    return Case(name, tuple(typed(each + QUIET) for each in (line, *then)), exact)


def mistake(name: str, line: str) -> Case:
    """Make a case of a line that is refused."""
    return Case(name, (typed(line),))


CASES = (
    Case("help", (typed("--help"),)),
    Case("config", (typed("--cfg job"),)),
    # Cuts, normalizers, units.
    one("fixed", f"{OWN}{FIXED}steps=4"),
    one("fixed-steps", f"{OWN}accum=fixed accum.steps=3 steps=4"),
    one(
        "micro-and-steps",
        "model._target_=mine.Net data._target_=mine.Lines data.path=lines.txt "
        "accum=fixed accum.micro=4 accum.steps=3 steps=3",
    ),
    one("budget", f"{OWN}accum=budget accum.max_tokens=256 steps=4"),
    one("auto", f"{OWN}steps=4", exact=False),
    one("tokens", f"{OWN}{FIXED}batch=tokens batch.global=700 steps=4"),
    one("per-sample", f"{OWN}{FIXED}batch.normalizer=samples steps=3"),
    one("mean-of-means", f"{OWN}{FIXED}batch.normalizer=micro_batches steps=3"),
    one("drop-tail", f"{OWN}{FIXED}batch.tail=drop epochs=2"),
    one("one-epoch", f"{OWN}{FIXED}epochs=1"),
    one("own-cut", f"--config-dir my_conf {OWN}accum=pairs steps=3"),
    one("own-strategy", f"--config-dir my_conf {OWN}{FIXED}accum.gradient=mine steps=3"),
    # Models, data, objectives, optimizers, schedules.
    one("gpt", f"{SMALL}{FIXED}"),
    one("gpt-packed", f"{SMALL}accum=budget accum.max_tokens=128 accum.packed=true"),
    one("gpt-recompute", f"{SMALL}{FIXED}activation_checkpointing=true"),
    one("gpt-bf16", f"{SMALL}{FIXED}precision=bf16"),
    one("text", f"{TEXT}{FIXED}batch.global=16 steps=3 optimizer.lr=1e-2"),
    one("text-cut", f"{TEXT}{FIXED}batch.global=16 steps=3 data.overlong=cut"),
    one(
        "jsonl",
        f"data=text data.path=rows.jsonl data.field=body data.max_length=48 {SHAPE}"
        f"{FIXED}batch.global=8 steps=3",
    ),
    one(
        "token-file",
        "data=tokens data.path=tokens.bin model.vocab_size=300 model.width=32 model.num_heads=2 "
        f"model.num_layers=1 data.max_length=32 {FIXED}batch.global=8 steps=3",
    ),
    one("classify", f"{IMAGES}objective=classify {FIXED}steps=4"),
    one("own-objective", f"{IMAGES}objective._target_=mine.Brier {FIXED}steps=4"),
    one("hook", f"{OWN}{FIXED}hooks=[mine.Watch] steps=3"),
    one("sgd", f"{OWN}{FIXED}optimizer=sgd optimizer.lr=0.1 steps=4"),
    one(
        "adam-target", f"{OWN}{FIXED}optimizer._target_=torch.optim.Adam optimizer.lr=1e-3 steps=3"
    ),
    one(
        "groups",
        f'{OWN}{FIXED}optimizer.groups={{"embed*":{{lr:1e-3}},"head*":{{frozen:true}}}} steps=3',
    ),
    one("wsd", f"{OWN}{FIXED}scheduler=wsd scheduler.warmup=2 steps=6"),
    one("constant", f"{OWN}{FIXED}scheduler=constant steps=3"),
    one("scaled", f"{OWN}{FIXED}scheduler.reference_batch=4 scheduler.scale=sqrt steps=3"),
    one("no-clip", f"{OWN}{FIXED}clip_norm=null steps=3"),
    one("evaluate-often", f"{OWN}{FIXED}eval.every=2 checkpoint.every=2 checkpoint.keep=2 steps=6"),
    one("deterministic", f"{SMALL}{FIXED}deterministic=true"),
    one("layout", f"{SMALL}{FIXED}deterministic=layout"),
    one(
        "hugging-face",
        "model._target_=transformers.GPT2LMHeadModel "
        "model.config._target_=transformers.GPT2Config model.config.n_layer=1 "
        "model.config.n_embd=16 model.config.n_head=2 model.config.vocab_size=258 data=text "
        f"data.path=lines.txt data.max_length=48 {FIXED}batch.global=8 steps=2",
    ),
    # Commands.
    one("plan", f"plan {OWN}{FIXED}"),
    one("plan-absent-gpu", "plan accum.memory=80GiB device=cuda", exact=False),
    one("verify", f"verify {OWN}{FIXED}"),
    one("verify-gpt", f"verify {SMALL}{FIXED}"),
    one("evaluate", f"{OWN}{FIXED}steps=3", "evaluate run={run}"),
    one("export", f"{OWN}{FIXED}steps=3", "export run={run} export.to=weights"),
    one(
        "export-then-init",
        f"{SMALL}{FIXED}",
        "export run={run} export.to=weights",
        f"{SMALL}{FIXED}init=weights",
    ),
    one("init", f"{OWN}{FIXED}steps=3", f"{OWN}{FIXED}init={{run}} steps=2"),
    one("run-auto", f"{OWN}{FIXED}steps=2 name=named", "evaluate run=auto"),
    Case(
        "sweep",
        (typed(f"-m {OWN}accum=fixed accum.micro=4,8 optimizer.lr=1e-3,1e-2 steps=2{QUIET}"),),
    ),
    one("recipe", f"recipe=recipes/friend.yaml {OWN}steps=3"),
    # Resuming.
    one("resume", f"{OWN}{FIXED}steps=3", "resume={run} steps=5"),
    one("resume-finished", f"{OWN}{FIXED}steps=2", "resume={run}"),
    one("resume-auto", f"{OWN}{FIXED}steps=2", "resume=auto steps=4"),
    one("resume-refused", f"{OWN}{FIXED}steps=2", "resume={run} batch.global=8"),
    one("resume-other-cut", f"{OWN}{FIXED}steps=2", "resume={run} accum.micro=2 steps=4"),
    Case(
        "interrupt",
        (
            typed(
                f"{OWN}{FIXED}hooks=[mine.Slow] steps=12 checkpoint.every=4{QUIET}",
                signal_after=5,
                signal_number=signal.SIGTERM,
            ),
            typed("resume={run}"),
        ),
        exact=False,
    ),
    Case(
        "kill",
        (
            typed(
                f"{OWN}{FIXED}hooks=[mine.Slow] steps=12 checkpoint.every=2{QUIET}",
                signal_after=5,
                signal_number=signal.SIGKILL,
            ),
            typed("resume={run}"),
        ),
        exact=False,
    ),
    # Ranks.
    one("ddp", f"{OWN}{FIXED}parallel=ddp parallel.ranks=2 steps=3"),
    one("ddp-3", f"{OWN}{FIXED}parallel=ddp parallel.ranks=3 steps=3"),
    one("ddp-immediate", f"{OWN}{FIXED}parallel=ddp parallel.ranks=2 sync=immediate steps=3"),
    one("fsdp", f"{SMALL}{FIXED}parallel=fsdp parallel.ranks=2"),
    one("fsdp-immediate", f"{SMALL}{FIXED}parallel=fsdp parallel.ranks=2 sync=immediate"),
    one("ranks-auto", f"{OWN}{FIXED}parallel.ranks=2 steps=3"),
    one(
        "ddp-then-fsdp",
        f"{SMALL}{FIXED}parallel=ddp parallel.ranks=2",
        "resume={run} parallel=fsdp parallel.ranks=2 steps=6",
    ),
    Case(
        "torchrun",
        (
            Line(
                tuple(f"{OWN}{FIXED}steps=3{QUIET}".split()),
                launcher=(
                    "torch.distributed.run",
                    "--standalone",
                    "--nproc-per-node=2",
                    "-m",
                    "trainer",
                ),
            ),
        ),
    ),
    # Mistakes.
    mistake("unknown-key", "batch.golbal=3 steps=x"),
    mistake("plus-key", "+typo=1"),
    mistake("unknown-option", "model=gtp_tiny"),
    mistake("out-of-range", "batch.global=0 optimizer.lr=-1"),
    mistake("contradiction", "accum=fixed batch.global=10 accum.micro=3 accum.steps=3"),
    mistake("indivisible", "parallel=hsdp parallel.ranks=3 parallel.shard=2"),
    mistake("both-lengths", "steps=3 epochs=1"),
    mistake("no-run", "evaluate run=outputs/none"),
    mistake("no-file", "data=text data.path=missing.txt"),
    mistake("bad-json", "data=text data.path=broken.jsonl"),
    mistake("no-recipe", "recipe=nobody"),
    mistake("hostile-recipe", "recipe=recipes/hostile.yaml"),
    mistake("missing-class", "model._target_=mine.Missing"),
    mistake("wrong-argument", "model._target_=mine.Net model.widht=3"),
    mistake("raising-data", f"{OWN}{FIXED}data._target_=mine.Raising steps=2{QUIET}"),
    mistake(
        "not-finite",
        f"{OWN}{FIXED}optimizer=sgd optimizer.lr=1e30 clip_norm=null "
        f"nonfinite.limit=2 steps=9{QUIET}",
    ),
    mistake("sweep-with-mistake", "-m batch.global=8,x steps=2"),
)

TEXT_LINES = "".join(
    f"{'line ' * (1 + 7 * i % 11)}{i} of a small text whose lines differ in length\n\n"
    for i in range(120)
)

FILES: dict[str, str | bytes] = {
    "mine.py": (Path(__file__).parent / "mine.py").read_text(),
    "lines.txt": TEXT_LINES,
    "rows.jsonl": "".join(
        json.dumps({"body": f"{'word ' * (i % 9 + 1)}{i}"}) + "\n" for i in range(64)
    ),
    "broken.jsonl": '{"text": "fine"}\n{"text": broken\n',
    "tokens.bin": b"".join((i * 7919 % 300).to_bytes(2, "little") for i in range(4096)),
    "my_conf/accum/pairs.yaml": "_target_: mine.Pairs\n",
    "my_conf/accum/gradient/mine.yaml": "_target_: mine.Strategy\n",
    "recipes/friend.yaml": "optimizer:\n  lr: 2.0e-3\naccum:\n  micro: 6\n"
    "defaults:\n  - override /accum: fixed\n",
    "recipes/hostile.yaml": "model:\n  _target_: os.system\n  command: touch hacked\n",
}
