"""A run on Google's protocol, goes on on another machine as it would on a disk.

The server is `gcp-storage-emulator`, of the Python that GCS_PYTHON names, or of this one.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lib.processes import Command, free_port, skip_without
from tests.lib.run_support import BASE

PYTHON = os.environ.get("GCS_PYTHON", sys.executable)
SERVER = """
import sys
from gcp_storage_emulator.server import create_server
create_server("127.0.0.1", int(sys.argv[1]), in_memory=True, default_bucket="bucket").run()
"""

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]


@pytest.fixture
def server(monkeypatch, tmp_path):
    pytest.importorskip("gcsfs", reason="pip install '.[storage]'")
    remedy = "pip install gcp-storage-emulator, and set GCS_PYTHON"
    skip_without(PYTHON, "gcp_storage_emulator", remedy)
    port = free_port()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("TRAIN_CACHE", str(tmp_path / "cache"))
    # It would ask Google what kind of bucket this is.
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    argv = [PYTHON, "-c", SERVER, str(port)]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as made:
        yield
        made.kill()


def trained(outputs, steps, **more):
    typed = BASE | {"steps": steps, "checkpoint.every": "2", "name": "one", "outputs": outputs}
    words = [f"{key}={value}" for key, value in (typed | {"trust": "[tests]"} | more).items()]
    ended = Command.start(Path.cwd(), words).end()
    assert ended.code == 0, ended.errors


@pytest.mark.usefixtures("server")
def test_a_run_on_gcs_goes_on_on_another_machine_as_on_a_disk():
    for outputs in ("on a disk", "gs://bucket/my runs"):
        trained(outputs, 4)
        shutil.rmtree("cache/storage", ignore_errors=True)
        trained(outputs, 6, resume="auto")
    found = []
    for folder in (Path("cache/storage/gs/bucket/my runs"), Path("on a disk")):
        files = sorted(folder.glob("*/*/checkpoints/step-00000006/*.safetensors"))
        found.append({file.name: file.read_bytes() for file in files})
    assert found[0] == found[1]
    assert len(found[0]) == 3
