"""What a run records about where it ran."""

from __future__ import annotations

import json
import subprocess
import time

import torch

from trainer.report import records


def git(folder, *arguments):
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, timeout=30)


def test_the_environment_is_plain_and_names_what_shapes_a_result():
    found = records.environment()
    json.dumps(found, allow_nan=False)
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["hydra-core"].startswith("1.3")
    assert found["hardware"]["cores"] >= 1
    assert found["hardware"]["memory_bytes"] > 2**20
    assert len(found["hardware"]["gpus"]) == torch.cuda.device_count()


def test_a_revision_tells_changed_files_from_unchanged(tmp_path):
    assert records.git_revision(tmp_path) is None
    git(tmp_path, "init", "-q")
    assert records.git_revision(tmp_path) is None
    (tmp_path / "code.py").write_text("a")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    clean = records.git_revision(tmp_path)
    assert clean is not None
    assert len(clean["commit"]) == 40
    assert clean["dirty"] is False
    (tmp_path / "new.py").write_text("untracked files do not count")
    assert records.git_revision(tmp_path) == clean
    (tmp_path / "code.py").write_text("b")
    assert records.git_revision(tmp_path) == clean | {"dirty": True}


def test_a_git_that_hangs_or_is_missing_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "GIT_TIMEOUT_S", 0.2)
    slow = tmp_path / "git"
    slow.write_text("#!/bin/sh\nexec sleep 20\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    started = time.monotonic()
    assert records.git_revision(tmp_path) is None
    assert time.monotonic() - started < 5
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert records.git_revision(tmp_path) is None
