"""`train hosts` prints a line for each host, which starts the run there as it is pasted."""

import shlex
import socket
from pathlib import Path

import pytest

from tests.lib.run_support import shell


@pytest.mark.usefixtures("own_folder")
def test_each_host_gets_a_line_with_the_words_and_nothing_is_started(monkeypatch, capsys):
    monkeypatch.setenv("NCCL_IB_TIMEOUT", "22")
    monkeypatch.setenv("TRAIN_CACHE", "/shared/cache")
    words = ["steps=3", 'name="a-b"', "data.path=with space.txt", "data=text", "device=cpu"]
    Path("with space.txt").write_text("a text\n" * 40)
    here = socket.gethostname()
    assert shell(shlex.join(["hosts", "10.9.0.1", *words, f"{here},10.9.0.3", "port=1"])) == 0
    assert [*map(str, Path().iterdir())] == ["with space.txt"]
    shown = capsys.readouterr()
    lines = [line for line in shown.out.splitlines() if line.startswith("cd ")]
    assert len(lines) == 3
    for number, line in enumerate(lines):
        _, folder, _, *rest = shlex.split(line)
        assert folder == str(Path.cwd())
        assert {"NCCL_IB_TIMEOUT=22", "TRAIN_CACHE=/shared/cache"} <= {*rest}
        assert f"--node-rank={number}" in rest
        assert {"--nnodes=3", "--master-addr=10.9.0.1", "--master-port=1"} <= {*rest}
        assert rest[rest.index("trainer") + 1 :] == words
    assert f"on {here} (this host):" in shown.out
    assert "other hosts are taken to be as this one" in shown.err
