"""No library reports to its maker what runs here: each look-up of a host and connection is seen."""

import os
import re
import select
import shlex
import subprocess
import sys
from socket import create_server

import pytest

from tests.lib import cli_support
from tests.lib.cli_support import CHECKOUT, make_own_folder
from tests.lib.hf_toys import TEXTS, save_llama, save_tokenizer, write_lines
from tests.lib.nightly import nightly, slow
from trainer.cli.plugins import SWITCHES, switch_off_reports

# Python runs it in every process, as it starts.
HOOK = """
import os, socket

def looked_up(host):
    if (name := host.decode() if isinstance(host, bytes) else host) not in (
        None, "", "localhost", "127.0.0.1", "::1", "0.0.0.0", "::", socket.gethostname()
    ):
        with open(os.environ["SEEN"], "a") as file:
            file.write(f"{name}\\n")
        raise socket.gaierror(-2, "no host but this one")

def getaddrinfo(host, *rest, _inner=socket.getaddrinfo, **named):
    looked_up(host)
    return _inner(host, *rest, **named)

def connect(self, address, _inner=socket.socket.connect):
    if self.family in (socket.AF_INET, socket.AF_INET6):
        looked_up(address[0])
    return _inner(self, address)

socket.getaddrinfo, socket.socket.connect = getaddrinfo, connect
"""
QUIET = re.compile(r"CI|PYTEST.*|GITHUB.*|HF_.*|.*TELEMETRY|DO_NOT_TRACK|WANDB.*|.*_proxy", re.I)
"""Variables in which libraries see that they are tested, or where a user is known."""

TEXT = "data=text data.path=net.py model=gpt_tiny"
RECORDS = "data=hf data.path=records.jsonl model=hf model.path=llama"
ALL_TRACKERS = "logger=[wandb,tensorboard,mlflow]"
OWN_RUN = cli_support.OWN_RUN.replace("wandb.mode=disabled", "wandb.mode=offline")


@pytest.mark.parametrize(
    "typed",
    [
        OWN_RUN,
        slow(f"{OWN_RUN} logger=[mlflow]".replace("wandb.mode=offline", "")),
        nightly(f"{OWN_RUN} {ALL_TRACKERS}"),
        nightly(f"{RECORDS} {ALL_TRACKERS}"),
        nightly(f"{RECORDS} parallel.ranks=2"),
        nightly(f"{RECORDS} wandb.mode=online"),
        nightly("data=digits model=resnet"),
        nightly("data=stdlib model=gpt_tiny"),
        nightly(f"{TEXT} {ALL_TRACKERS} parallel.ranks=2"),
        nightly(f"-m {OWN_RUN} seed=1,2 hydra/launcher=joblib {ALL_TRACKERS}"),
        nightly(f"-m {OWN_RUN} seed=1,2 hydra/launcher=submitit_local {ALL_TRACKERS}"),
        nightly(f"-m {OWN_RUN} seed=choice(1,2) hydra/sweeper=optuna hydra.sweeper.n_trials=2"),
    ],
)
def test_a_run_asks_for_no_host(typed, tmp_path, monkeypatch):
    make_own_folder(tmp_path, monkeypatch)
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(HOOK)
    if "llama" in typed:
        save_llama(tmp_path / "llama")
        save_tokenizer(tmp_path / "llama")
        write_lines(tmp_path / "records.jsonl", [{"text": text} for text in TEXTS])
    seen = tmp_path / "seen"
    environ = {name: value for name, value in os.environ.items() if not QUIET.fullmatch(name)}
    with create_server(("127.0.0.1", 0)) as proxy:  # for programs that are not in Python
        address = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        environ |= {"HTTPS_PROXY": address, "HTTP_PROXY": address, "SEEN": str(seen)}
        environ |= {"PYTHONPATH": f"{tmp_path / 'hook'}:{CHECKOUT}", "HOME": str(tmp_path)}
        words = shlex.split(typed)
        words += [] if "steps=" in typed else ["steps=1", "batch.global=8", "device=cpu"]
        done = subprocess.run(
            [sys.executable, "-m", "trainer", *words], env=environ, capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr.decode()
        assert not seen.exists(), seen.read_text()
        assert not select.select([proxy], [], [], 0)[0], "somebody asked for a host"


def test_what_a_user_set_stays(monkeypatch):
    for name in SWITCHES:
        monkeypatch.setenv(name, "theirs")  # put back after the test
        monkeypatch.delenv(name)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "false")
    switch_off_reports()
    assert {name: os.environ[name] for name in SWITCHES} == {
        **SWITCHES,
        "MLFLOW_DISABLE_TELEMETRY": "false",
    }
