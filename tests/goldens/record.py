"""Record what command lines do, or compare two recordings.

    python -m tests.goldens.record FOLDER            run every case and write FOLDER/goldens.json
    python -m tests.goldens.record FOLDER NAME ...   run these only
    python -m tests.goldens.record --compare A B     name every difference that is not allowed

Values depend on the machine and on PyTorch, so recordings are not committed: make one before a
change and one after it, on one machine. What may differ, and why, stands in `may_differ.json`:
`{"case": {"path.in.the.recording": "reason"}}`, `*` for any case or any part of a path.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tests.goldens.cases import CASES, FILES, Case, Line

HERE = Path(__file__).parent
TIMED = {"seconds", "tokens_per_second", "memory_bytes", "wall_seconds", "eval_seconds"}
TIMED |= {"model_flops_per_second", "memory_limit_bytes", "step_seconds", "seconds_per_step"}
"""Entries whose values no two runs share."""
VARYING = re.compile(r"^  (time|speed)  |^  memory .* at the peak|tokens/s  mfu|\bETA\b")
"""Lines of the screen that no two runs share."""
STEPS_TO_SIGNAL = 5


def record(folder: Path, names: Sequence[str]) -> None:
    """Run cases one after the other, and write what they did."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "goldens.json"
    known = json.loads(path.read_text()) if names and path.exists() else {}
    for case in CASES:
        if names and case.name not in names:
            continue
        started = time.perf_counter()
        known[case.name] = run_case(case, folder / case.name)
        codes = [line["exit_code"] for line in known[case.name]["lines"]]
        # A case that is refused by mistake would be the same before and after any change.
        odd = "" if any(codes) == case.fails else ": NOT AS THE CASE IS MEANT"
        seconds = time.perf_counter() - started
        print(f"{case.name}: exit {codes}, {seconds:.1f} s{odd}", flush=True)
        path.write_text(json.dumps(known, indent=1, sort_keys=True))


def run_case(case: Case, folder: Path) -> dict[str, Any]:
    """Run the lines of a case in a folder of its own, and gather what they left."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    typed = " ".join(word for line in case.lines for word in line.typed)
    for path in toys(folder.parent / "toys"):
        if path.name in re.split(r"[\s=:,}]", typed):
            (folder / path.name).symlink_to(path)
    lines = [run_line(line, folder, exact=case.exact) for line in case.lines]
    configs = sorted(folder.glob("outputs/**/config.yaml"))
    copies = {".hydra", "files", "wandb"}  # where Hydra and W&B keep a run's config
    runs = [path.parent for path in configs if not copies & set(path.parts)]
    return {"lines": lines, "runs": [describe(run, exact=case.exact) for run in runs]}


@cache
def toys(folder: Path) -> list[Path]:
    """Save small models of transformers, records for them, and pictures."""
    from tests.lib.hf_toys import TEXTS, save_job_files, write_lines  # noqa: PLC0415
    from tests.lib.picture_toys import draw_pictures  # noqa: PLC0415

    if folder.exists():
        return sorted(folder.iterdir())
    folder.mkdir()
    with contextlib.chdir(folder):
        save_job_files()
        draw_pictures(Path("pictures"))
        couples = [{"query": text, "passage": text.split()[0]} for text in TEXTS]
        write_lines(Path("couples.jsonl"), couples)
    return sorted(folder.iterdir())


def run_line(line: Line, folder: Path, *, exact: bool) -> dict[str, Any]:
    """Run one command; gives its exit code, and its words for a person without what varies."""
    runs = sorted(folder.glob("outputs/2*/*/"))
    typed = [part.replace("{run}", str(runs[-1] if runs else "none")) for part in line.typed]
    own = {"TRAIN_CACHE": str(folder / ".cache"), "XDG_STATE_HOME": str(folder / ".state")}
    fixed = {"PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    process = subprocess.Popen(
        [sys.executable, "-m", *(line.launcher or ("trainer",)), *typed],
        cwd=folder,
        env={**os.environ, **own, **fixed},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    if line.signal:
        while process.poll() is None and steps_of_newest(folder) < STEPS_TO_SIGNAL:
            time.sleep(0.02)
        process.send_signal(line.signal)
    out, err = process.communicate(timeout=300)
    killed = line.signal == signal.SIGKILL
    answers = [] if killed else re.findall(r"^train: (?!warning).*", err, flags=re.M)
    return {
        "typed": list(line.typed),
        "exit_code": process.returncode,
        "errors": [neutral(answer, folder) for answer in answers],
        "num_error_lines": None if killed or line.launcher else len(err.splitlines()),
        "prints": bool(out.strip()),
        "screen": [neutral(row, folder) for row in out.splitlines() if not VARYING.search(row)]
        if exact
        else [],
    }


def steps_of_newest(folder: Path) -> int:
    """Count the records of the newest run."""
    runs = sorted(folder.glob("outputs/2*/*/metrics.jsonl"))
    return runs[-1].read_bytes().count(b"\n") if runs else 0


def neutral(line: str, folder: Path) -> str:
    """Drop what differs from run to run."""
    line = line.replace(str(folder), "FOLDER")
    line = re.sub(r"\d{4}-\d\d-\d\d/[\d-]+", "DATE", line)
    line = re.sub(r"[\d.,]+[kM]? (tokens|samples)/s", "N \\1/s", line)
    line = re.sub(r"\d:\d\d:\d\d left", "N left", line)
    line = re.sub(r"[\d.]+% of [\d.]+ GiB", "N% of N GiB", line)
    line = re.sub(r"\d+(\.\d+)? ?(s|ms|min)\b", "N s", line)
    line = re.sub(r"\d+(\.\d+)? ?(MiB|GiB|KiB)\b", "N \\2", line)
    return re.sub(r" +", " ", line)


def describe(run: Path, *, exact: bool) -> dict[str, Any]:
    """Say what a run folder holds: names, keys, ids, losses, weights."""
    files = sorted(
        re.sub(r"\d{8}_\d{6}-\w+|debug.*|run-.*", "ID", str(path.relative_to(run)))
        for path in run.rglob("*")
        if path.is_file() and "wandb" not in path.parts
    )
    known: dict[str, Any] = {"files": files}
    for path in sorted(run.glob("*.json")):
        content = json.loads(path.read_text())
        is_whole = exact and path.name == "plan.json"
        known[path.name] = values_of(content, run) if is_whole else shape_of(content)
    entries = list(entries_of(run / "metrics.jsonl"))
    known["metrics_keys"] = sorted({key for entry in entries for key in entry})
    keep = {"step", "epoch", "samples", "tokens", "loss", "lr", "grad_norm", "eval_loss", "skipped"}
    keep |= {"accum_steps", "micro_batches", "padding"} if exact else set()
    known["metrics"] = [
        {key: rounded(entry[key], exact=exact) for key in entry.keys() & keep} for entry in entries
    ]
    known["ids"] = [entry["ids"] for entry in entries_of(run / "samples.jsonl")]
    for path in sorted(run.glob("checkpoints/step-*"))[-1:] if exact else ():
        weights = b"".join(map(weights_of, sorted(path.glob("*.safetensors"))))
        known["weights"] = {"checkpoint": path.name, "values": hashlib.sha256(weights).hexdigest()}
    return known


def weights_of(file: Path) -> bytes:
    """Give the bytes of the model's tensors in a safetensors file, by name."""
    from safetensors import safe_open  # noqa: PLC0415 - comparing needs no torch

    with safe_open(file, framework="pt") as opened:
        return b"".join(
            name.encode() + opened.get_tensor(name).contiguous().flatten().numpy().tobytes()
            for name in sorted(opened.keys())
            if name.startswith("model.")
        )


def entries_of(path: Path) -> Iterator[dict[str, Any]]:
    """Read a file of JSON lines; nothing where there is none."""
    if path.exists():
        yield from map(json.loads, path.read_text().splitlines())


def rounded(value: object, *, exact: bool) -> object:
    """Keep four digits of what depends on a cut that timing chose."""
    return float(f"{value:.4g}") if isinstance(value, float) and not exact else value


def shape_of(content: object, key: str = "") -> object:
    """Keep the keys of a JSON file, and the types of its values."""
    if isinstance(content, Mapping):
        return {name: shape_of(value, name) for name, value in content.items() if name != "choices"}
    if isinstance(content, list):
        return [shape_of(content[0])] if content else []
    return key if key in TIMED else type(content).__name__


def values_of(content: object, run: Path, key: str = "") -> object:
    """Keep a JSON file whole, but for what no two runs share."""
    if isinstance(content, Mapping):
        return {name: values_of(value, run, name) for name, value in content.items()}
    if isinstance(content, list):
        return [values_of(value, run, key) for value in content]
    if isinstance(content, str):
        return neutral(content, run.parents[2])
    return key if key in TIMED else content


def compare(old: Path, new: Path) -> int:
    """Print every difference that is not allowed; gives their number."""
    allowed = json.loads((HERE / "may_differ.json").read_text())
    texts = ((path / "goldens.json").read_text() for path in (old, new))
    # On which line of the cases' own file a class stands is no behaviour.
    before, after = (json.loads(re.sub(r"(mine\.py):\d+", r"\1", text)) for text in texts)
    faults = 0
    for name in sorted(before.keys() | after.keys()):
        rules = {**allowed.get("*", {}), **allowed.get(name, {})}
        for place, was, now in differences(before.get(name), after.get(name)):
            if not any(fnmatch.fnmatch(place, rule) for rule in rules):
                faults += 1
                old_text, new_text = json.dumps(was), json.dumps(now)
                print(f"{name}: {place}: {old_text[:160]} -> {new_text[:160]}")
    print(f"{len(before)} cases, {faults} differences that are not allowed")
    return faults


def differences(was: Any, now: Any, place: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Walk over two recordings and give where they differ."""
    if isinstance(was, dict) and isinstance(now, dict):
        for key in sorted(was.keys() | now.keys()):
            yield from differences(was.get(key), now.get(key), f"{place}.{key}".lstrip("."))
    elif isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        for index, (one, other) in enumerate(zip(was, now, strict=True)):
            yield from differences(one, other, f"{place}.{index}")
    elif isinstance(was, list) and isinstance(now, list) and is_named(was) and is_named(now):
        for name in sorted({*was} ^ {*now}):
            yield f"{place}.{name}", *((name if name in each else None) for each in (was, now))
    elif was != now:
        yield place, was, now


def is_named(entries: Sequence[Any]) -> bool:
    """Whether a list is of names, each of which stands once, such as files."""
    return all(isinstance(each, str) for each in entries) and len({*entries}) == len(entries)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--compare"]:
        sys.exit(min(1, compare(Path(sys.argv[2]), Path(sys.argv[3]))))
    record(Path(sys.argv[1]).absolute(), sys.argv[2:])
