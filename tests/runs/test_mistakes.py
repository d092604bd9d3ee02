"""Mistakes that no table of lines can hold: odd characters, environments, and what is not run."""

from pathlib import Path

import pytest

from tests.lib.cli_support import faults, make_own_folder, prepared, python
from tests.lib.run_support import overrides, shell
from trainer.cli.main import run
from trainer.core.errors import TrainError
from trainer.data.index import cached_index

LONG = "x" * 5000
ABSURD = [
    f"hydra.run.dir={LONG}",
    f"evaluate run=[{LONG},{LONG}]",
    f"resume={'x/' * 4000}",
    *("resume={}", "evaluate run=[null]", "command=[train]"),
    f"seed={'9' * 5000}",
    "hydra.searchpath=x",
    "resume@z=1e309",
    f"+model.x={'{a:' * 700}1{'}' * 700}",
]
"""What no program could take."""


@pytest.mark.parametrize("argument", ABSURD, ids=lambda argument: argument[:24])
def test_what_no_program_could_take_is_one_line_too(argument, capsys):
    assert shell(argument) in (2, 4)
    lines = faults(capsys.readouterr().err)
    assert lines
    assert all(len(line) <= 200 for line in lines)


def test_all_faults_come_at_once_whatever_plus_signs_are_typed(capsys, monkeypatch):
    typed = ["accum=atuo", "batch.golbal=1", "optimizer.lr=abc", "seed=-1"]
    for prefix in ("", "+", "++"):
        line = " ".join(["x=[1", "recipe=./none.yaml", *(prefix + each for each in typed)])
        assert shell(line) == 2
        keys = [f.lstrip("+").split(":")[0].split("=")[0] for f in faults(capsys.readouterr().err)]
        assert sorted(keys) == ["accum", "batch.golbal", "optimizer.lr", "recipe", "seed", "x"]
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    assert shell("batch.golbal=3") == 2
    assert "Traceback" in capsys.readouterr().err, "as Hydra's users may wish"


SECRETS = (
    "data.path=https://me:very-secret-word@host/data",
    "data.token=abc",
    "++model.hub_token=abc",
    "wandb.project=ghp_abcdefghijklmnopqrstuvwxyz0123456789",
    "'data.path=${oc.env:WANDB_API_KEY}'",
    "hydra.job.env_set.WANDB_API_KEY=abc",
    "hydra.run.dir=a/very-secret-111222",
    "hydra.sweep.subdir=very-secret-111222",
)


def test_a_secret_is_refused_and_not_repeated_and_words_that_sound_like_one_pass(
    tmp_path, capsys, monkeypatch
):
    make_own_folder(tmp_path, monkeypatch)
    words = "model.eos_token=end model.max_tokens=3 model.key_size=4"
    prepared(f"data.max_length=64 name=my-sk-learn model._target_=net.Net {words}")
    monkeypatch.setenv("WANDB_API_KEY", "very-secret-111222")
    for line in SECRETS:
        assert shell(line) == 2
        err = capsys.readouterr().err
        assert "looks like a secret" in err or "holds the secret of $WANDB_API_KEY" in err
        assert "very-secret" not in err
        if "very-secret" not in line:
            assert line.strip("'").partition("=")[2] not in err


def test_of_many_ranks_the_first_complains_and_none_sweeps(capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert shell("-m seed=1,2") == 2
    (fault,) = faults(capsys.readouterr().err)
    assert fault == "-m: a sweep starts its own ranks; run it without torchrun"
    monkeypatch.setenv("RANK", "1")
    assert shell("batch.golbal=3") == 2
    assert capsys.readouterr().err == ""


def test_nothing_heavy_is_imported_before_a_config_is_valid(tmp_path):
    lines = {
        "batch.golbal=3": 2,
        "resume=nowhere": 4,
        "plan data=text data.path=no.txt": 3,
        "plan data=tokens data.path=no.bin model.vocab_size=9": 3,
        "init=nowhere": 4,
        "--help": 0,
        "--cfg job": 0,
    }
    (tmp_path / "probe.py").write_text(
        "import sys\n"
        "from trainer.cli.main import run\n"
        f"codes = [run(line.split()) for line in {list(lines)}]\n"
        f"assert codes == {list(lines.values())}, codes\n"
        "heavy = {'torch', 'numpy', 'wandb', 'safetensors', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = python("probe.py", tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.splitlines()) == len([code for code in lines.values() if code])
    for what in ("data.path=no.txt", "data.path=no.bin", "init=nowhere"):
        assert f"train: error: {what}: no such file or folder" in done.stderr
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["probe.py"]


@pytest.mark.parametrize("odd", ["~nosuch/x", LONG], ids=["nobody", "long"])
def test_a_path_that_cannot_be_is_not_there_and_no_traceback(odd, monkeypatch, capsys):
    lines = {
        f"recipe='\"{odd}.yaml\"'": 2,
        f"resume='\"{odd}\"'": 4,
        f"evaluate run='\"{odd}\"'": 4,
        f"init='\"{odd}\"'": 4,
        f"data=text data.path='\"{odd}\"'": 3,
        f"--config-dir={odd} steps=1": 2,
    }
    for line, code in lines.items():
        assert shell(line) == code, line[:20]
        (fault,) = faults(capsys.readouterr().err)
        assert "no such" in fault, fault
    monkeypatch.setenv("TRAIN_RECIPES", odd)
    assert shell("--help") == 0
    assert shell("batch.golbal=1") == 2
    assert "batch.golbal: unknown setting" in capsys.readouterr().err
    monkeypatch.setenv("TRAIN_CACHE", odd)
    with pytest.raises(TrainError, match="TRAIN_CACHE"):
        cached_index("text", "", {}, lambda add: [])


def test_a_nul_character_is_named_with_its_key(capsys):
    Path("odd.yaml").write_text('data: {path: "a\\0b"}\n')
    assert run(["recipe=./odd.yaml", "data=text"]) == 2
    assert "data.path: holds a NUL character" in capsys.readouterr().err
    assert run(["data.path=a\0b"]) == 2
    assert "holds a NUL character" in capsys.readouterr().err


def test_a_deleted_folder_is_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert shell("steps=3") == 2
    (fault,) = faults(capsys.readouterr().err)
    assert fault == "the current folder was deleted; change to one that exists"


def test_a_run_without_its_overrides_says_what_holds_them(capsys):
    assert shell(f"{' '.join(overrides('steps=1'))} hydra.run.dir=run") == 0
    for content in ("", "not: a list"):
        Path("run/.hydra/overrides.yaml").write_text(content)
        capsys.readouterr()
        assert shell("evaluate run=run") == 2
        (fault,) = faults(capsys.readouterr().err)
        assert "overrides.yaml: " in fault
        assert "it holds a list of overrides, `[]` for none" in fault
