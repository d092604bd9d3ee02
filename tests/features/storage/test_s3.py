"""Whole runs against an S3 server: moto's, of the Python that MOTO_PYTHON names, or of this one."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import fsspec
import pytest

from tests.lib.cli_support import python
from tests.lib.processes import Command, free_port, skip_without
from tests.lib.run_support import BASE

PYTHON = os.environ.get("MOTO_PYTHON", sys.executable)
SERVER = """
import sys
from moto.server import ThreadedMotoServer
for line in sys.stdin:
    if line == "start\\n":
        server = ThreadedMotoServer("127.0.0.1", int(sys.argv[1]), verbose=False)
        server.start()
    else:
        server.stop()
    print(line, end="", flush=True)
"""
SLOW = """
import os
import time


class Slow:
    def on_step(self, entry):
        time.sleep(600 if str(entry["step"]) == os.environ.get("STOPS_AT") else 0.5)
"""
RUNS, COPIES = "s3://bucket/my runs", "cache/storage/s3/bucket/my runs"
LINE = BASE | {"steps": "10", "checkpoint.every": "2", "hooks": "[slow.Slow]"}
LINE |= {"trust": "[slow,tests]"}

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]


class Server:
    """An S3 server that answers or not, and never loses an object."""

    def __init__(self, port):
        argv = [PYTHON, "-c", SERVER, str(port)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(argv, text=True, stderr=subprocess.DEVNULL, **pipes)
        self.be("start")

    def be(self, word):
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == f"{word}\n"

    def steps(self, name):
        """The steps whose manifest a reader finds, of a run by its name; each has all its files."""
        files = fsspec.filesystem("s3", skip_instance_cache=True).find("bucket")
        found = [each for each in files if f"-{name}/" in each and "/step-" in each]
        folders = [Path(each).parent for each in found if each.endswith("manifest.json")]
        for folder in folders:
            assert len([each for each in found if Path(each).parent == folder]) == 4
        return [int(folder.name.removeprefix("step-")) for folder in folders]


@pytest.fixture
def server(monkeypatch, tmp_path):
    pytest.importorskip("s3fs", reason="pip install '.[storage]'")
    skip_without(PYTHON, "moto.server", "pip install 'moto[server]', and set MOTO_PYTHON")
    port, own = free_port(), {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any"}
    own |= {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "TRAIN_CACHE": str(tmp_path / "cache")}
    for name, value in {**own, "AWS_DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(name, value)
    Path("slow.py").write_text(SLOW)
    made = Server(port)
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir("bucket")
    yield made
    made.process.kill()
    made.process.communicate()


def started(name, stops_at="", **more):
    """Start a run in the store, in a process of its own."""
    typed = LINE | {"name": name, "outputs": RUNS} | more
    words = [f"{key}={value}" for key, value in typed.items()]
    return Command.start(Path.cwd(), words, STOPS_AT=stops_at)


def wait_for(true):
    """Wait for a fact, up to two minutes."""
    limit = time.monotonic() + 120
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.5)


def copy(name):
    (folder,) = Path(COPIES).glob(f"*/*-{name}")
    return folder


def weights(folder):
    files = sorted(folder.glob("checkpoints/step-00000010/*.safetensors"))
    return {file.name: file.read_bytes() for file in files}


def test_a_killed_run_goes_on_on_another_machine_as_if_nothing_was(server):
    assert started("whole").end().code == 0
    wanted = weights(copy("whole"))
    killed = started("killed", stops_at="7")
    wait_for(lambda: server.steps("killed") == [4, 6])
    killed.process.kill()
    killed.process.communicate()
    shutil.rmtree("cache/storage")
    listed = python(f"-m trainer ls 'outputs={RUNS}'", Path.cwd()).stdout
    rows = {line.split()[0]: line.split()[1] for line in listed.splitlines()}
    # Nobody here can see whether its process lives.
    assert rows == {"name": "state", "whole": "completed", "killed": "running"}
    ended = started("killed", resume="auto").end()
    assert ended.code == 0, ended.errors
    assert weights(copy("killed")) == wanted
    assert len(wanted) == 3
    assert max(server.steps("killed")) == 10


def test_a_run_outlives_a_store_that_is_away(server):
    run = started("midst")
    wait_for(lambda: server.steps("midst"))
    server.be("stop")
    run.wait_for(f"{COPIES}/*/*-midst/checkpoints/step-00000008/manifest.json")
    server.be("start")
    ended = run.end()
    assert ended.code == 0, ended.errors
    assert server.steps("midst") == [8, 10]
    run = started("start")
    run.wait_for(f"{COPIES}/*/*-start/metrics.jsonl")
    server.be("stop")
    ended = run.end()
    assert ended.code == 8
    assert "the run goes on, and each checkpoint tries again" in "".join(ended.errors)
    assert "lacks the end of this run" in ended.errors[-1]
    ended = started("start", resume="auto", steps="12").end()
    assert ended.code == 8
    assert "its copy on this machine is used" in ended.errors[0]
    server.be("start")
    assert server.steps("start") == []
    ended = started("start", resume="auto", steps="12").end()
    assert (ended.code, ended.errors) == (0, [])
    assert server.steps("start") == [10, 12]


@pytest.mark.usefixtures("server")
def test_folders_that_are_objects_and_names_that_begin_the_same_are_no_data():
    store, text = fsspec.filesystem("s3", skip_instance_cache=True), b"first\n\nsecond\n\nthird\n"
    for name in ("data/", "data/inner/", "data/a.txt", "data/inner/b.txt", "data2/c.txt"):
        store.pipe_file(f"bucket/{name}", text * (not name.endswith("/")))
    words = "data=text data.path=s3://bucket/data model=gpt_tiny batch.global=2"
    ended = python(f"-m trainer plan {words}", Path.cwd())
    files = [str(file) for file in Path("cache/storage/s3/bucket").rglob("*.txt")]
    wanted = [f"cache/storage/s3/bucket/data/{name}" for name in ("a.txt", "inner/b.txt")]
    assert sorted(files) == wanted, ended.stderr
