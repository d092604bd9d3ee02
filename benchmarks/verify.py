"""What `train verify` says of the classes of transformers, beside an independent check.

    python benchmarks/verify.py [--kinds causal_lm,masked_lm] [--only Llama,Bert] [--limit 20]
                                [--seconds 60] [--command] [--json outputs/benchmarks/verify.json]

Walks the auto mappings of transformers, makes a small config of each class (`verify_models.py`),
and verifies what one would type: `model=hf model.config=FOLDER`, eight ragged samples
(`verify_samples.py`), micro-batches of three; with `--command` by the command itself, with its plan
and folder. Beside the verdict stands whether the gradient of the whole batch is that of the splits
[3, 2, 3] and [1 x 8], computed in float64 without the trainer (`verify_truth.py`), and, where it is
not, whether the first culprit is the true one. Nothing is downloaded. Each class is a line of the
`.jsonl` beside the JSON as soon as it is there; what stands there is not run again, so that a run
may be stopped, and go on.

To hold: no class is called exact that is not, at most 2 % are not proven, and of those that are not
exact the first culprit is the true one in 95 %.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import signal
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import FOLDER, print_table, write_results

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from verify_models import KINDS, Model, models
from verify_truth import truth_of

from trainer import train
from trainer.assemble.build import assemble
from trainer.assemble.step import step_context
from trainer.cli.compose import Composer
from trainer.cli.prepare import prepare_run
from trainer.cli.python_api import overrides_of
from trainer.core.errors import NotExactError, TrainError
from trainer.core.world import World
from trainer.verify.proof import verify

EXACT = ("exact", "exact_without_dropout")
RUN = (
    *("batch.global=8", "accum=fixed", "accum.micro=3", "steps=1", "eval.every=null"),
    *("checkpoint.every=null", "wandb.mode=disabled", "device=cpu", "precision=fp32"),
)

ADVICE: Sequence[tuple[str, str]] = (
    ("batchnorm=micro", "batchnorm=micro"),
    (r"objective=(next_token|classify|token_classify|multiple_choice|seq2seq)$", r"objective=\1"),
)
"""What a refusal tells one to type, and the setting for that."""

CULPRITS: Sequence[tuple[str, str]] = (
    ("^FNet", r"\.fourier\."),  # mixes all positions
    ("^ConvBert", "key_conv_attn_layer"),  # a convolution over unmasked keys
    ("^Nystromformer|^Yoso", r"\.attention\.self"),  # landmarks, hashes and a convolution
    ("^Funnel", "^funnel.encoder"),  # pools positions
    ("^CpmAnt", "^cpmant "),  # builds its mask as for padding on the left
    ("^Canine", "^canine "),  # as many molecules as the padded length gives
    ("^T5Gemma2ForSequence", "in its own forward"),  # its shift drops the last token of a full row
)
"""By class: what the first culprit is called, as read from the source of transformers."""

WORDS: Mapping[str, Sequence[str]] = {
    "padding": ("padding",),
    "neighbours": ("normalises over the samples", "the rest of its micro-batch", "keeps state"),
    "loss": ("is not a sum",),
}
"""By the cause that the independent check finds: words of the reason."""

Row = dict[str, Any]


class TooLong(BaseException):
    """A class took longer than it may; no `Exception`, which models may catch."""


def check(model: Model, seconds: int, *, is_whole: bool) -> Row:
    """Run one class both ways."""
    row: Row = {"class": model.name, "kind": model.kind}
    begin, cpu = time.perf_counter(), time.process_time()
    with _limited(seconds):
        row |= _verdict(model, is_whole=is_whole)
    row |= {"seconds": time.perf_counter() - begin, "cpu_seconds": time.process_time() - cpu}
    if not {"verdict", "crashed"} & row.keys():
        return row
    truth, fault = None, "took too long"
    with _limited(seconds):
        try:
            truth = truth_of(model)
        except Exception as error:
            fault = _line(error)
    if "crashed" in row:
        if truth is None:  # without the trainer, too
            row["left_out"] = f"does not run so small: {row.pop('crashed')}"
        return row
    if truth is None:
        return {**row, "truth": fault}
    row |= {"truth": truth.word, "truth_error": truth.error}
    row["is_false"] = row["verdict"] in EXACT and not truth.is_exact
    row["is_alarm"] = row["verdict"] == "not_exact" and truth.is_exact
    if row["verdict"] not in EXACT:
        row["is_named"] = _is_named(row, truth.cause)
    return row


def _verdict(model: Model, *, is_whole: bool) -> Row:
    """Verify as typed, and again as a refusal advises."""
    own = model.lines()
    lines = ["verify", *RUN, *own]
    typed: list[str] = []
    while True:
        try:
            report = _by_command([*lines, *typed]) if is_whole else _by_room([*lines, *typed])
        except TrainError as error:
            advice = [
                re.sub(".*" + what, setting, str(error), flags=re.DOTALL)
                for what, setting in ADVICE
                if re.search(what, str(error))
            ]
            if set(advice) <= set(typed):
                return {"refused": _line(error)}
            typed += advice[:1]
            continue
        except Exception as error:
            return {"crashed": _line(error)}
        return {
            "verdict": report["verdict"],
            "error": report["max_relative_error"],
            "dtype": report["dtype"],
            "typed": typed,
            "culprits": [[each["module"], each["reason"]] for each in report["culprits"]],
            "notes": report["notes"],
        }


def _by_command(lines: Sequence[str]) -> Mapping[str, Any]:
    """Run the command, with its plan and its folder."""
    folder = tempfile.mkdtemp()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(NotExactError):
        train([*lines, f"outputs={folder}"])
    report: Mapping[str, Any] = json.loads(next(Path(folder).rglob("verify.json")).read_text())
    return report


def _by_room(lines: Sequence[str]) -> Mapping[str, Any]:
    """Compose and build the same, and verify it, without a plan and a folder."""
    composer = Composer.of()
    run = assemble(prepare_run(overrides_of(lines, composer), composer).config, World())
    with contextlib.closing(run.feed(run.world)) as feed:
        batch = feed.next()
    return verify(step_context(run), batch, feed, whole_fits=True).to_json()


def _is_named(row: Row, cause: str) -> bool:
    """Whether the first culprit is the one that the independent check and the source name."""
    if not row["culprits"]:
        return False
    name, reason = row["culprits"][0]
    listed = next((what for which, what in CULPRITS if re.search(which, row["class"])), None)
    if listed is not None:
        return re.search(listed, f"{name} {reason}") is not None
    return any(word in reason for word in WORDS.get(cause, ()))


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


@contextmanager
def _limited(seconds: int) -> Iterator[None]:
    """End a block that takes longer."""

    def stop(*_: object) -> None:
        raise TooLong

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)  # of this process, however busy the machine is
    try:
        yield
    except TooLong:
        pass
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def main() -> None:
    """Check what is asked for, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--only", default="", help="parts of class names, by commas")
    parser.add_argument("--limit", type=int, default=1000, help="classes per kind, evenly spaced")
    parser.add_argument(
        "--seconds", type=int, default=60, help="of a processor, that a class may take"
    )
    parser.add_argument(
        "--command", action="store_true", help="run the whole command, plan and all"
    )
    parser.add_argument("--json", type=Path, default=FOLDER / "verify.json")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    import transformers  # noqa: PLC0415 - after the switch to no network

    transformers.logging.set_verbosity(50)
    torch.set_num_threads(1)
    journal = asked.json.with_suffix(".jsonl")
    journal.parent.mkdir(parents=True, exist_ok=True)
    rows = (
        [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
    )
    done = {(row["kind"], row["class"]) for row in rows}
    with tempfile.TemporaryDirectory() as root, journal.open("a") as out:
        for kind in asked.kinds.split(","):
            for row in _rows(kind, Path(root), asked, done):
                rows.append(row)
                print(json.dumps(row), file=out, flush=True)
                print(*_cells(row), flush=True)
    _report(rows)
    write_results(asked.json, vars(asked), {"figures": figures(rows), "rows": rows})


def _rows(
    kind: str, root: Path, asked: argparse.Namespace, done: set[tuple[str, str]]
) -> Iterator[Row]:
    wanted = asked.only.split(",")
    for each in models(
        kind, root, asked.limit, lambda n: any(w in n for w in wanted) and (kind, n) not in done
    ):
        if isinstance(each, Model):
            row = check(each, asked.seconds, is_whole=asked.command)
        else:
            row = {"class": each[0], "kind": kind, "left_out": each[1]}
        yield row


def _cells(row: Row) -> list[str]:
    why = next((f"{w}: {row[w]}" for w in ("left_out", "refused", "crashed") if w in row), None)
    if why is None and "verdict" not in row:
        why = "took too long"
    seconds = f"{row['seconds']:.1f}" if "seconds" in row else ""
    if why is not None:
        return [row["class"], row["kind"], why[:80], "", seconds]
    mark = " FALSE" if row.get("is_false") else " ALARM" if row.get("is_alarm") else ""
    culprit = row["culprits"][0][0] if row["culprits"] else ""
    if "is_named" in row and not row["is_named"]:
        culprit += " ?"
    return [row["class"], row["kind"], row["verdict"] + mark, row["truth"], seconds, culprit]


def figures(rows: Sequence[Row]) -> Mapping[str, Any]:
    """Count what is to hold."""
    judged = [row for row in rows if "verdict" in row]
    unlike = [row for row in judged if row["verdict"] not in EXACT]
    seconds = sorted(row["cpu_seconds"] for row in judged)
    return {
        "classes": len({row["class"] for row in judged}),
        "rows": len(judged),
        "verdicts": dict(Counter(row["verdict"] for row in judged)),
        "truths": dict(Counter(row["truth"].partition(":")[0] for row in judged)),
        "false_exact": [row["class"] for row in judged if row.get("is_false")],
        "false_alarms": [row["class"] for row in judged if row.get("is_alarm")],
        "not_proven": [row["class"] for row in judged if row["verdict"] == "not_proven"],
        "true_culprit_first": sum(row.get("is_named", False) for row in unlike),
        "of": len(unlike),
        "cpu_seconds_median": seconds[len(seconds) // 2] if seconds else None,
        "cpu_seconds_largest": seconds[-1] if seconds else None,
        "refused": len([row for row in rows if "refused" in row]),
        "crashed": len([row for row in rows if "crashed" in row]),
        "took_too_long": len(
            [r for r in rows if not {"verdict", "refused", "crashed", "left_out"} & r.keys()]
        ),
        "cannot_be_built": len([row for row in rows if "left_out" in row]),
    }


def _report(rows: Sequence[Row]) -> None:
    print()
    print_table(
        ["class", "kind", "verdict", "check", "seconds", "first culprit"],
        [[*_cells(row), ""][:6] for row in rows if "verdict" in row],
    )
    print()
    for name, value in figures(rows).items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
