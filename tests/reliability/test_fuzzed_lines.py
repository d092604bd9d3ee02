"""Harness 23, second half: valid command lines with a single edit, at random.

Mistakes that people make are in `tests/messages/*.yaml`. What comes of blind edits is valid, or
refused with exit 2 and one line per fault, without a traceback or a folder.
"""

import re
import sys
from random import Random

from tests.lib.nightly import counts
from tests.reliability.support import cases, replay
from trainer.cli import main as cli

LINES = [
    "batch.global=512 accum=auto",
    "recipe=quickstart optimizer.lr=0.001 scheduler.warmup=3",
    "accum=fixed accum.micro=8 batch.global=64 steps=6 seed=1",
    "accum=budget accum.max_tokens=8192 precision=bf16 clip_norm=null",
    "model=gpt_tiny model.width=64 model.num_heads=2 data.max_length=128",
    "batch=tokens batch.global=65536 batch.tail=drop epochs=1",
    "scheduler=wsd optimizer=sgd optimizer.lr=0.1 optimizer.weight_decay=0",
    "checkpoint.every=10 checkpoint.keep=3 checkpoint.asynchronous=true log.samples=true",
    "data=text data.path=corpus.jsonl data.holdout=0.1 data.on_bad=skip num_workers=2",
    "name=first wandb.mode=disabled wandb.tags=[a,b] outputs=runs device=cpu",
    "model._target_=net.Net model.width=16 objective.label_smoothing=0.1",
    "hooks=[pkg.Hook] trust=[pkg] eval.every=5 nonfinite.limit=3 deterministic=true",
]
CHARACTERS = "=[]{}()'\"\\,:;.$%&*#@!?~^+-_/| \t\n\0"
JUNK = [*CHARACTERS, "${x}", "null", "true", "1e9", "-1", "é", ".."]


def edited(line: str, chance: Random) -> list[str]:
    """Make one edit to one word of a line."""
    words = line.split()
    place = chance.randrange(len(words))
    word = words[place]
    at = chance.randrange(len(word))
    junk = chance.choice(JUNK)
    key, _, value = word.partition("=")
    before, here, after = word[:at], word[at], word[at + 1 :]
    words[place] = chance.choice(
        [
            *(before + after, before + junk + here + after, before + junk + after),
            *(before + word[at : at + 2][::-1] + word[at + 2 :], before + 2 * here + after),
            *(word.swapcase(), key, f"{key}=", f"={value}", f"{key}={junk}"),
            *(f"{key}={value}{value}", f"{value}={key}", f"{key}.{key}={value}"),
            *(f"{key}/{key}={value}", f"{key}@{key}={value}", f"~{word}", f"+{word}"),
            *(f"++{word}", f"--{word}", f"{key}=[{value}]", f"{key}={{{value}:{value}}}"),
            *(f"{key}={value},{value}", f"{key}={'9' * 400}", junk),
        ]
    )
    return words + ([word] if chance.random() < 0.1 else [])


@counts(5, 500)
def test_an_edited_line_is_valid_or_refused_in_one_line_per_fault(
    count, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    refused = 0
    for case, chance in cases(count):
        argv = ["--cfg", "job", *edited(chance.choice(LINES), chance)]
        code = cli.run(argv)
        screen = capsys.readouterr().err
        about, lines = f"{replay(case)}: {argv}: {code}: {screen}", screen.splitlines()
        assert code in (0, 2, 3), about
        if code:
            refused += 1
            assert lines, about
            for line in lines:
                is_note = line.startswith("train: ") and line.endswith("; the last one counts")
                assert line.startswith("train: error: ") or is_note, about
                # Lists of choices, of whatever length, are whole.
                assert len(re.sub(r"(?:[\w.-]+, ){8,}", "", line)) <= 214, about
        assert not list(tmp_path.iterdir()), about
    assert refused > count // 3
