"""TensorBoard's table of HParams, as its own server gives it for a sweep."""

import json
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from socket import create_server
from urllib.request import Request, urlopen

import pytest

from tests.lib.cli_support import OWN_RUN, make_own_folder
from tests.lib.run_support import shell

ASKED = {"allowedStatuses": ["STATUS_SUCCESS", "STATUS_RUNNING"], "sliceSize": 9}


def ask(address, what, deadline):
    """Ask the plugin; until the server has read the files it has none of them."""
    while True:
        asked = Request(f"{address}/data/plugin/hparams/{what}", json.dumps(ASKED).encode())
        asked.add_header("Content-Type", "application/json")
        try:
            with closing(urlopen(asked, timeout=5)) as answer:
                if found := json.loads(answer.read()).get("sessionGroups"):
                    return found
        except OSError:
            pass
        assert time.monotonic() < deadline
        time.sleep(0.5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of its libraries
def test_jobs_of_a_sweep_have_their_settings_and_losses_in_one_table(tmp_path, monkeypatch):
    make_own_folder(tmp_path, monkeypatch)
    assert shell(f"-m {OWN_RUN} optimizer.lr=1e-3,3e-3 logger=[tensorboard,wandb]") == 0
    with create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    argv = [sys.executable, "-m", "tensorboard.main", "--logdir=outputs", "--load_fast=false"]
    with Path("server.log").open("w") as log:
        server = subprocess.Popen([*argv, f"--port={port}"], stdout=log, stderr=log)
    try:
        groups = ask(f"http://127.0.0.1:{port}", "session_groups", time.monotonic() + 120)
    finally:
        server.kill()
        server.wait()
    assert {group["hparams"]["optimizer.lr"] for group in groups} == {1e-3, 3e-3}
    for group in groups:
        (session,) = group["sessions"]
        assert session["status"] == "STATUS_SUCCESS"
        named = {value["name"]["tag"]: value["value"] for value in session["metricValues"]}
        assert named.keys() >= {"train/loss"}
        assert all(value > 0 for value in named.values())
