"""Stand in for Slurm on one machine: sbatch, srun, scontrol and sacct, as far as jobs can see them.

A "node" is a name; all tasks run here. A test asks for a preemption by writing into `preempt` how
many steps must have been taken: the tasks of the job then get the signal of its `--signal`, once.
What `scontrol requeue` names starts again when its script has ended, with SLURM_RESTART_COUNT.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path

PLACE = "STAND_IN_PLACE"  # environment variable: the folder of the queue
NODES = ("localhost", "other")  # ranks meet on the first


def install(folder: Path, checkout: Path) -> dict[str, str]:
    """Make the commands in a folder; gives the environment in which a shell finds them."""
    (folder / "bin").mkdir(parents=True)
    lines = {name: f"{__file__} {name}" for name in ("sbatch", "srun", "scontrol", "sacct")}
    lines |= {"train": "-m trainer", "torchrun": "-m torch.distributed.run"}
    for name, words in lines.items():
        path = folder / "bin" / name
        path.write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        path.chmod(0o755)
    paths = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    own = {"PATH": paths, "PYTHONPATH": str(checkout), PLACE: str(folder), "OMP_NUM_THREADS": "1"}
    return {**os.environ, **own}


def documented_files() -> dict[str, str]:
    """Read the files for sbatch that the documentation shows, by name."""
    pages = (Path(__file__).parents[2] / "docs/how-to").glob("slurm*.md")
    text = "".join(page.read_text() for page in pages)
    return {
        name: file
        for file, name in re.findall(r"```sh\n(#!/bin/bash\n# (\S+)\n.*?)```", text, re.S)
    }


def options_in(script: str) -> dict[str, str]:
    """Read the options of every line `#SBATCH`."""
    lines = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    return dict(re.findall(r"--([\w-]+)(?:[= ]([^\s-]\S*))?", " ".join(lines)))


def sbatch(words: Sequence[str], place: Path) -> int:
    """Queue a script, and start it at once, in the background."""
    number = 1 + len([*place.glob("job-*")])
    (place / f"job-{number}").mkdir()
    print(f"Submitted batch job {number}", flush=True)
    log = (place / f"job-{number}" / "log").open("a")
    subprocess.Popen(
        [sys.executable, __file__, "batch", str(number), *words],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    return 0


def batch(words: Sequence[str], place: Path) -> int:
    """Run a job, or each of an array's one after the other, until nothing puts it back."""
    number, script = words[0], Path(words[1])
    options = options_in(script.read_text())
    first, _, last = options.get("array", "").partition("%")[0].partition("-")
    tasks = range(int(first), int(last or first) + 1) if first else [None]
    for task in tasks:
        nodes, per_node = int(options.get("nodes", 1)), int(options.get("ntasks-per-node", 1))
        own = {
            "SLURM_JOB_ID": number if task is None else f"{number}{task:03}",
            "SLURM_JOB_NODELIST": ",".join(NODES[:nodes]),
            **dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), str(nodes)),
            "SLURM_NTASKS": str(nodes * per_node),
            "SLURM_NTASKS_PER_NODE": str(per_node),
        }
        if task is not None:
            own |= {"SLURM_ARRAY_JOB_ID": number, "SLURM_ARRAY_TASK_ID": str(task)}
        _run([str(script), *words[2:]], own, options.get("signal", "TERM"), place)
    (place / f"job-{number}" / "done").touch()
    return 0


def _run(words: Sequence[str], own: Mapping[str, str], number: str, place: Path) -> None:
    requeue = place / f"requeue-{own['SLURM_JOB_ID']}"
    for restarts in count():
        restarted = {"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}
        process = subprocess.Popen(["bash", *words], env={**os.environ, **own, **restarted})
        while process.poll() is None:
            time.sleep(0.02)
            _preempt(own["SLURM_JOB_ID"], number.rpartition(":")[2].partition("@")[0], place)
        print(f"job {own['SLURM_JOB_ID']}: exit code {process.returncode}", flush=True)
        if not requeue.exists():
            return
        requeue.unlink()


def _preempt(job: str, name: str, place: Path) -> None:
    asked = place / "preempt"
    files = [*Path().glob("outputs/**/metrics.jsonl")] if asked.exists() else []
    if any(path.read_bytes().count(b"\n") >= int(asked.read_text()) for path in files):
        asked.unlink()
        for task in (place / f"tasks-{job}").read_text().split():
            os.killpg(int(task), signal.Signals[f"SIG{name}"])


def srun(words: Sequence[str], place: Path) -> int:
    """Start a command once for each task, on every node; the exit code is the largest."""
    rest, files = [*words], {}
    while rest and rest[0].startswith("--"):
        name, _, value = rest.pop(0).partition("=")
        if name in ("--output", "--error"):
            files[name] = value or rest.pop(0)
    job, nodes = os.environ["SLURM_JOB_ID"], int(os.environ["SLURM_NNODES"])
    per_node, started = int(os.environ["SLURM_NTASKS_PER_NODE"]), []
    for rank in range(nodes * per_node):
        own = {
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank % per_node),
            "SLURM_NODEID": str(rank // per_node),
            "SLURM_STEP_NUM_TASKS": str(nodes * per_node),
            "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{nodes})" if nodes > 1 else str(per_node),
            "SLURM_STEP_NODELIST": os.environ["SLURM_JOB_NODELIST"],
        }
        log = (place / f"task-{job}-{rank}").open("a") if files else None
        started.append(
            subprocess.Popen(
                rest, env={**os.environ, **own}, stdout=log, stderr=log, process_group=0
            )
        )
    (place / f"tasks-{job}").write_text(" ".join(str(each.pid) for each in started))
    return max(code if (code := each.wait()) >= 0 else 128 - code for each in started)


def scontrol(words: Sequence[str], place: Path) -> int:
    """Put a job back into the queue, or list the names of nodes."""
    if words[0] == "requeue":
        number, _, task = words[1].partition("_")  # of an array: 7_2
        (place / f"requeue-{number}{f'{int(task):03}' if task else ''}").touch()
    else:
        print("\n".join(words[2].split(",")))
    return 0


def sacct(_: Sequence[str], __: Path) -> int:
    """Know of no job, as a database that is behind; submitit then looks for the results."""
    print("JobID|State|NodeList")
    return 0


if __name__ == "__main__":
    sys.exit(globals()[sys.argv[1]](sys.argv[2:], Path(os.environ[PLACE])))
