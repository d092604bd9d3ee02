"""The files of docs/how-to/slurm.md and slurm-torchrun.md, and sweeps by submitit, on a real Slurm.

A job that is put back waits for two minutes there, which these tests cut short.
"""

import re
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from tests.lib.cluster import Hosts, wait_for
from tests.lib.nightly import LIMIT_S
from tests.lib.run_support import TOYS, overrides, read_json, steps
from tests.lib.slurm import documented_files

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(LIMIT_S)]

FILES = documented_files()
URGENT = ["sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--wrap=sleep 1"]


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANKS", "1")  # of each node, under torchrun


def submit(slurm: Hosts, name: str, *typed: str) -> str:
    """Queue a file of the docs for nodes without GPUs, and wait until it runs; gives the job."""
    text = FILES[name].replace("--ntasks-per-node=8", "--ntasks-per-node=1")
    Path("job.sh").write_text(re.sub(r" --[cg]pus-per-\w+=\d+", "", text))
    words = overrides(f"steps=200 hooks=[{TOYS}.Slow]")
    if name != "array.sh":  # whose jobs have names of their own
        words = ["name=gpt", *words]
    job = slurm.run(["sbatch", "--parsable", "job.sh", *words, *typed]).strip()
    wait_for(lambda: "RUNNING" in jobs_of(slurm, job), slurm)
    return job


def jobs_of(slurm: Hosts, job: str) -> list[str]:
    """The states of a job, or of each of an array's."""
    return [state for name, state in queue(slurm).items() if name.partition("_")[0] == job]


def queue(slurm: Hosts) -> dict[str, str]:
    """The state of every job that is queued or runs; those that were put back begin soon."""
    found = {}
    for line in slurm.run(["squeue", "--noheader", "--array", "--format=%i %T %S"]).splitlines():
        job, found[job], begins = line.split()
        waits_s = (datetime.fromisoformat(begins) - datetime.now()).seconds if "T" in begins else 0
        if found[job] == "PENDING" and 30 < waits_s < 300:
            # Not at once, when nodes still refuse what they took the job's right from.
            slurm.run(["scontrol", "update", f"JobId={job}", "StartTime=now+5"])
    return found


def wait_for_end(slurm: Hosts, job: str) -> dict[str, str]:
    """Wait for a job's last end, and give what Slurm says of it."""
    wait_for(lambda: not jobs_of(slurm, job), slurm, 120)
    said = slurm.run(["scontrol", "show", "job", job])
    return dict(re.findall(r"(\w+)=(\S+)", said))


def is_importing() -> bool:
    """Whether Python has begun, and no more."""
    time.sleep(0.3)
    return True


def has_folder() -> bool:
    return any(Path().glob("outputs/*/*-gpt/config.yaml"))


def takes_steps(num_runs: int = 1) -> bool:
    found = [path.read_bytes() for path in Path().glob("outputs/*/*/metrics.jsonl")]
    return sum(lines.count(b"\n") > 5 for lines in found) == num_runs


def weights() -> dict[str, bytes]:
    """The bytes of the weights that each run ended with, by the name of the run."""
    found = {}
    for run in Path().glob("outputs/*/*"):
        status = read_json(run / "status.json")
        assert (status["state"], status["step"]) == ("completed", 200)
        assert [entry["step"] for entry in steps(run)] == [*range(1, 201)]
        file = run / "checkpoints" / "step-00000200" / "model.safetensors"
        found[run.name.split("-", 4)[-1]] = file.read_bytes()
    return found


@pytest.fixture(scope="module")
def whole(
    slurm: Hosts, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, bytes]]:
    """Gives the weights of jobs of a file to which nothing happens."""
    found = dict[str, dict[str, bytes]]()

    def run(name: str) -> dict[str, bytes]:
        if name not in found:
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(tmp_path_factory.mktemp("whole"))
                assert wait_for_end(slurm, submit(slurm, name))["Restarts"] == "0"
                found[name] = weights()
        return found[name]

    return run


MOMENTS = {
    "before the folder": is_importing,
    "before the first step": has_folder,
    "amid its steps": takes_steps,
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(
    ("name", "number"), [("one-node.sh", "USR1"), ("nodes.sh", "TERM"), ("torchrun.sh", "TERM")]
)
def test_a_job_that_is_preempted_at_any_moment_is_put_back_and_completes(
    name, number, moment, slurm, whole
):
    expected = whole(name)
    job = submit(slurm, name)
    wait_for(MOMENTS[moment], slurm)
    folders = [*Path().glob("outputs/*/*-gpt")]
    assert bool(folders) == (moment != "before the folder")
    slurm.run(["scancel", f"--signal={number}", job])
    end = wait_for_end(slurm, job)
    assert (end["JobState"], end["Restarts"]) == ("COMPLETED", "1")
    assert folders in ([], [*Path().glob("outputs/*/*-gpt")])
    assert weights() == expected


@pytest.mark.parametrize("name", ["one-node.sh", "nodes.sh", "torchrun.sh"])
def test_a_job_that_makes_way_for_an_urgent_one_and_reaches_its_limit_has_the_same_weights(
    name, slurm, whole
):
    expected = whole(name)
    job = submit(slurm, name)
    wait_for(takes_steps, slurm)
    slurm.run(URGENT)
    wait_for(lambda: jobs_of(slurm, job) == ["PENDING"], slurm)
    wait_for(lambda: jobs_of(slurm, job) == ["RUNNING"], slurm)
    # A signal comes two minutes before the limit: at once.
    set_limit(slurm, 2)
    wait_for(lambda: jobs_of(slurm, job) == ["PENDING"], slurm)
    set_limit(slurm, 10)
    end = wait_for_end(slurm, job)
    assert (end["JobState"], end["Restarts"]) == ("COMPLETED", "2")
    assert weights() == expected


def test_each_job_of_an_array_goes_on_in_its_own_folder(slurm, whole):
    expected = whole("array.sh")
    job = submit(slurm, "array.sh")
    wait_for(lambda: takes_steps(3), slurm)
    slurm.run(["scancel", "--signal=USR1", job])
    wait_for_end(slurm, job)
    assert {*expected} == {"rate-1e-3", "rate-3e-3", "rate-1e-2"}
    assert weights() == expected


def test_a_job_that_fails_is_not_put_back(slurm):
    for name in ("one-node.sh", "torchrun.sh"):
        job = submit(slurm, name, "clip_norm=high")
        end = wait_for_end(slurm, job)
        assert (end["JobState"], end["Restarts"]) == ("FAILED", "0")
        assert end["ExitCode"] == ("2:0" if name == "one-node.sh" else "1:0")


def test_a_suspended_job_of_two_nodes_goes_on(slurm):
    job = submit(slurm, "nodes.sh", "parallel.timeout_s=3")
    wait_for(takes_steps, slurm)
    slurm.run(["scontrol", "suspend", job])
    time.sleep(8)
    slurm.run(["scontrol", "resume", job])
    end = wait_for_end(slurm, job)
    assert (end["JobState"], end["Restarts"]) == ("COMPLETED", "0"), Path(
        f"slurm-{job}.out"
    ).read_text()


def set_limit(slurm: Hosts, minutes: int) -> None:
    """Give all jobs another time limit; near its end Slurm sends a signal within half a minute."""
    slurm.run(["scontrol", "update", f"JobId={','.join(queue(slurm))}", f"TimeLimit={minutes}"])


def states() -> list[str]:
    return [read_json(path)["state"] for path in Path().glob("outputs/multirun/*/*/*/status.json")]


@pytest.mark.parametrize("way", ["limit", "last limit", "urgent"])
def test_jobs_of_submitit_at_their_limit_or_that_make_way_go_back_into_the_queue(way, slurm):
    count, code = 1000 if way == "urgent" else 3000, int(way == "last limit")
    words = ["train", "-m", *overrides(f"steps={count} seed=0,1")]
    whole = slurm.start(0, [*words, "outputs=whole"])
    words += ["hydra/launcher=submitit_slurm", "hydra.launcher.timeout_min=10"]
    words += ["hydra.launcher.signal_delay_s=40", f"hooks=[{TOYS}.Slow]"]
    sweep = slurm.start(0, [*words, *["hydra.launcher.max_num_timeout=0"] * code])
    wait_for(lambda: len([*Path().glob("outputs/multirun/*/*/*/metrics.jsonl")]) == 2, slurm)
    slurm.run(URGENT) if way == "urgent" else set_limit(slurm, 1)
    wait_for(lambda: states() == ["preempted"] * 2, slurm)
    if way != "urgent":
        set_limit(slurm, 10)
    wait_for(lambda: queue(slurm) is not None and sweep.poll() is not None, slurm)
    assert sweep.returncode == code, slurm.printed()
    assert states() == ["preempted" if code else "completed"] * 2
    if not code:
        wait_for(lambda: whole.poll() is not None, slurm)
        files = f"multirun/*/*/?/checkpoints/step-*{count}/model.safetensors"
        found, other = (sorted(Path(name).glob(files)) for name in ("outputs", "whole"))
        assert [file.read_bytes() for file in found] == [file.read_bytes() for file in other]
