"""The command lines of the goldens, and the files they are typed beside."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Line:
    """One command.

    Attributes:
        typed: what follows `train`; `{run}` is the newest run folder.
        launcher: a module that starts `trainer`, with its own arguments, instead.
        signal: what is sent after five steps; 0 sends none.
    """

    typed: tuple[str, ...]
    launcher: tuple[str, ...] = ()
    signal: int = 0


@dataclass(frozen=True)
class Case:
    """Commands typed one after the other in one folder.

    Attributes:
        exact: whether every recording has the same bits; not where a cut follows from timings.
        fails: whether a command of it ends with another exit code than 0, which is what it shows.
    """

    name: str
    lines: tuple[Line, ...]
    exact: bool = True
    fails: bool = False


SHAPE = "model.width=32 model.num_heads=2 model.num_layers=2"
MINE = "model._target_=mine.Net data._target_=mine.Lines data.path=lines.txt"
WORDS = {
    "QUIET": "wandb.mode=disabled device=cpu log.samples=true precision=fp32",
    "LOUD": "",
    "MINE": MINE,
    "OWN": f"{MINE} batch.global=16",
    "SHAPE": SHAPE,
    "SMALL": f"{SHAPE} data.max_length=64 batch.global=16 steps=4",
    "TEXT": f"data=text data.path=lines.txt data.max_length=48 {SHAPE}",
    "FIXED": "accum=fixed accum.micro=5",
    "SHORT": "data=hf batch.global=8 steps=3 accum=fixed accum.micro=3",
    "CHAT": "model=hf model.path=llama data=hf data.path=chat.jsonl data.max_length=64 \
batch.global=8 steps=3 accum=fixed accum.micro=3",
    "BERT": "model=hf model.path=bert",
    "DIGITS": "model=resnet data=digits batch.global=32 steps=3 accum=fixed accum.micro=10",
    "PICTURES": "data=images data.path=pictures data.size=16 batch.global=16 steps=3 accum=fixed \
accum.micro=5",
    "TOWERS": "model._target_=mine.Towers data._target_=mine.Couples objective=contrastive \
batch.global=16 steps=3 accum=fixed accum.micro=5",
    "IMAGES": "model._target_=mine.Conv data._target_=mine.Rings batch.global=32",
}
"""What a word of the table stands for."""

TABLE = """
help: --help LOUD
config: --cfg job LOUD
fixed: OWN FIXED steps=4
fixed-steps: OWN accum=fixed accum.steps=3 steps=4
micro-and-steps: MINE accum=fixed accum.micro=4 accum.steps=3 steps=3
budget: OWN accum=budget accum.max_tokens=256 steps=4
~auto: OWN steps=4
tokens: MINE FIXED batch=tokens batch.global=700 steps=4
per-sample: OWN FIXED batch.normalizer=samples steps=3
mean-of-means: OWN FIXED batch.normalizer=micro_batches steps=3
drop-tail: OWN FIXED batch.tail=drop epochs=2
one-epoch: OWN FIXED epochs=1
own-cut: --config-dir my_conf OWN accum=pairs steps=3
own-strategy: --config-dir my_conf OWN FIXED accum.gradient=mine steps=3
own-batch: OWN FIXED batch._target_=mine.Ramp batch.first=4 steps=4
own-sync: OWN FIXED sync._target_=mine.Halves parallel=ddp parallel.ranks=2 steps=3
own-parts-of-data: model._target_=mine.Net data._target_=mine.Parted data.path=lines.txt \
batch.global=16 FIXED steps=3
transform: OWN FIXED transforms=[{_target_:mine.LowRank,rank:2}] steps=3
part: OWN FIXED parts=[mine.Ema] steps=2 ; resume={run} steps=4
resume-frozen: OWN FIXED optimizer.groups={"embed*":{frozen:true}} steps=2 ; resume={run} steps=4
gpt: SMALL FIXED
gpt-packed: SMALL accum=budget accum.max_tokens=128 accum.packed=true
gpt-recompute: SMALL FIXED activation_checkpointing=true
gpt-bf16: SMALL FIXED wandb.mode=disabled device=cpu log.samples=true precision=bf16 LOUD
text: TEXT FIXED batch.global=16 steps=3 optimizer.lr=1e-2
text-cut: TEXT FIXED batch.global=16 steps=3 data.overlong=cut
jsonl: data=text data.path=rows.jsonl data.field=body data.max_length=48 SHAPE FIXED \
batch.global=8 steps=3
token-file: data=tokens data.path=tokens.bin model.vocab_size=300 model.width=32 \
model.num_heads=2 model.num_layers=1 data.max_length=32 FIXED batch.global=8 steps=3
classify: IMAGES objective=classify FIXED steps=4
own-objective: IMAGES objective._target_=mine.Brier FIXED steps=4
hook: OWN FIXED hooks=[mine.Watch] steps=3
sgd: OWN FIXED optimizer=sgd optimizer.lr=0.1 steps=4
adam-target: OWN FIXED optimizer._target_=torch.optim.Adam optimizer.lr=1e-3 steps=3
groups: OWN FIXED optimizer.groups={"embed*":{lr:1e-3},"head*":{frozen:true}} steps=3
wsd: OWN FIXED scheduler=wsd scheduler.warmup=2 steps=6
constant: OWN FIXED scheduler=constant steps=3
scaled: OWN FIXED scheduler.reference_batch=4 scheduler.scale=sqrt steps=3
no-clip: OWN FIXED clip_norm=null steps=3
evaluate-often: OWN FIXED eval.every=2 checkpoint.every=2 checkpoint.keep=2 steps=6
deterministic: SMALL FIXED deterministic=true
layout: SMALL FIXED deterministic=layout
hugging-face: model._target_=transformers.GPT2LMHeadModel \
model.config._target_=transformers.GPT2Config model.config.n_layer=1 model.config.n_embd=16 \
model.config.n_head=2 model.config.vocab_size=258 data=text data.path=lines.txt \
data.max_length=48 FIXED batch.global=8 steps=2
plan: plan OWN FIXED
~plan-absent-gpu: plan accum.memory=80GiB device=cuda
verify: verify OWN FIXED
verify-gpt: verify SMALL FIXED
evaluate: OWN FIXED steps=3 ; evaluate run={run}
export: OWN FIXED steps=3 ; export run={run} export.to=weights
export-then-init: SMALL FIXED ; export run={run} export.to=weights ; SMALL FIXED init=weights
init: OWN FIXED steps=3 ; OWN FIXED init={run} steps=2
run-auto: OWN FIXED steps=2 name=named ; evaluate run=auto
sweep: -m OWN accum=fixed accum.micro=4,8 optimizer.lr=1e-3,1e-2 steps=2
recipe: recipe=recipes/friend.yaml OWN steps=3
resume: OWN FIXED steps=3 ; resume={run} steps=5
resume-finished: OWN FIXED steps=2 ; resume={run}
resume-auto: OWN FIXED steps=2 ; resume=auto steps=4
!resume-refused: OWN FIXED steps=2 ; resume={run} batch.global=8
resume-other-cut: OWN FIXED steps=2 ; resume={run} accum.micro=2 steps=4
ddp: OWN FIXED parallel=ddp parallel.ranks=2 steps=3
ddp-3: OWN FIXED parallel=ddp parallel.ranks=3 steps=3
ddp-immediate: OWN FIXED parallel=ddp parallel.ranks=2 sync=immediate steps=3
fsdp: SMALL FIXED parallel=fsdp parallel.ranks=2
fsdp-immediate: SMALL FIXED parallel=fsdp parallel.ranks=2 sync=immediate
ranks-auto: OWN FIXED parallel.ranks=2 steps=3
ddp-then-fsdp: SMALL FIXED parallel=ddp parallel.ranks=2 ; resume={run} parallel=fsdp \
parallel.ranks=2 steps=6
!unknown-key: batch.golbal=3 steps=x LOUD
!plus-key: +typo=1 LOUD
!unknown-option: model=gtp_tiny LOUD
!out-of-range: batch.global=0 optimizer.lr=-1 LOUD
!contradiction: accum=fixed batch.global=10 accum.micro=3 accum.steps=3 LOUD
!indivisible: parallel=hsdp parallel.ranks=3 parallel.shard=2 LOUD
!both-lengths: steps=3 epochs=1 LOUD
!no-run: evaluate run=outputs/none LOUD
!no-file: data=text data.path=missing.txt LOUD
!bad-json: data=text data.path=broken.jsonl LOUD
!no-recipe: recipe=nobody LOUD
!hostile-recipe: recipe=recipes/hostile.yaml LOUD
!missing-class: model._target_=mine.Missing LOUD
!wrong-argument: model._target_=mine.Net model.widht=3 LOUD
!raising-data: model._target_=mine.Net data._target_=mine.Raising data.path=lines.txt \
batch.global=16 FIXED steps=2
!not-finite: OWN FIXED optimizer=sgd optimizer.lr=1e30 clip_norm=null nonfinite.limit=2 steps=9
chat: CHAT log.generate=["the","a"] ; plan CHAT data.show=2
chat-lora: CHAT adapter=lora adapter.r=2 ; export run={run} export.to=adapter ; \
evaluate run={run} eval.predictions=true
reviews: BERT model.task=sequence_classification SHORT data.path=reviews.csv \
objective.metrics=[accuracy,f1]
entities: BERT model.task=token_classification SHORT data.path=ner.jsonl
answers: BERT model.task=question_answering SHORT data.path=squad.jsonl
summaries: model=hf model.path=t5 SHORT data.path=summaries.jsonl
masked: BERT SHORT data.path=corpus.jsonl objective=masked_lm
text-pairs: BERT model.task=embedding SHORT data.path=couples.jsonl
mixture: model=hf model.path=llama data=mixture batch.global=8 steps=3 accum=fixed accum.micro=3 \
data.sources={web:{path:corpus.jsonl,weight:2},chat:{path:chat.jsonl}}
batchnorm: DIGITS
batchnorm-pooled: DIGITS batchnorm=pooled batchnorm.precise=64 ; evaluate run={run}
batchnorm-ghost: DIGITS batchnorm=ghost batchnorm.group=8 accum.micro=16
!batchnorm-micro: DIGITS batchnorm=micro ; verify run={run}
batchnorm-frozen: DIGITS batchnorm=frozen
batchnorm-sync: DIGITS batchnorm=sync parallel=ddp parallel.ranks=2
pictures: model=vit model.patch_size=4 PICTURES ; export run={run} export.to=weights
contrastive: TOWERS ; evaluate run={run}
contrastive-ddp: TOWERS parallel=ddp parallel.ranks=2
noise: OWN FIXED log.noise_scale=1 steps=4
noise-ddp: OWN FIXED log.noise_scale=1 parallel=ddp parallel.ranks=2 steps=4
noise-ramp: OWN FIXED batch=noise_ramp batch.max=64 batch.every=2 steps=6
ramp: MINE FIXED batch=ramp batch.stages={0:8,32:16} steps=5
average: OWN FIXED ema.decay=0.9 steps=3 ; evaluate run={run} step=ema
muon: SMALL FIXED optimizer=muon
best: OWN FIXED eval.every=1 checkpoint.best=eval_loss steps=3 ; export run={run} step=best \
export.to=weights
sets: OWN FIXED eval.sets={more:{path:more.txt}} steps=3
parameters: SMALL FIXED log.parameters=2
page: OWN FIXED steps=3 ; report run={run} LOUD
tensorboard: OWN FIXED logger=[tensorboard] steps=3 device=cpu precision=fp32 LOUD
!sweep-with-mistake: -m batch.global=8,x steps=2 LOUD
"""
"""Case by case, what is typed. `;` divides commands; every one is quiet unless it is LOUD. What is
not the same bits in every recording begins with `~`, what does not end with exit code 0 with `!`.
"""


def line(text: str, launcher: tuple[str, ...] = (), number: int = 0) -> Line:
    """Spell out a command; no word of the goldens holds a blank."""
    words = text.split() if "LOUD" in text else [*text.split(), "QUIET"]
    typed = " ".join(WORDS.get(word, word) for word in words).split()
    return Line(tuple(typed), launcher, number)


def case(row: str) -> Case:
    """Read a row of the table."""
    name, _, text = row.partition(": ")
    lines = tuple(line(each) for each in text.split(" ; "))
    exact, fails = not name.startswith("~"), name.startswith("!")
    return Case(name.lstrip("~!"), lines, exact=exact, fails=fails)


def struck(name: str, text: str, number: int) -> Case:
    """Send a signal to a run, and go on with it."""
    lines = (line(text, number=number), line("resume={run} LOUD"))
    return Case(name, lines, exact=False, fails=True)


SLOW = "OWN FIXED hooks=[mine.Slow] steps=12"
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "trainer")
CASES = (
    *map(case, TABLE.split("\n")[1:-1]),
    struck("interrupt", f"{SLOW} checkpoint.every=4", signal.SIGTERM),
    struck("kill", f"{SLOW} checkpoint.every=2", signal.SIGKILL),
    Case("torchrun", (line("OWN FIXED steps=3", TORCHRUN),)),
)

FILES: dict[str, str | bytes] = {
    "mine.py": (Path(__file__).parent / "mine.py").read_text(),
    "lines.txt": "".join(
        f"{'line ' * (1 + 7 * i % 11)}{i} of a small text whose lines differ in length\n\n"
        for i in range(120)
    ),
    "more.txt": "".join(f"{'more ' * (1 + i % 5)}{i}\n\n" for i in range(20)),
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
