"""What a mistake is answered with: one line per fault, nothing started, no folder, exit 2.

Which values and combinations are wrong is shown in `tests/unit/config/test_validate.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.lib.cli_support import faults, make_own_folder, prepared, python
from tests.lib.run_support import overrides, shell
from trainer.cli.main import run
from trainer.core.errors import TrainError
from trainer.data.index import cached_index

CUTS = "Choices: auto, budget, fixed"

MISTAKES = {
    # keys and values
    "batch.golbal=512": "batch.golbal: unknown setting. Did you mean batch.global?",
    "foo/bar=baz": "foo/bar: unknown group",
    "batch.global=8,000": "several values are a sweep, which takes -m",
    "'batch.global=${nope}'": "batch.global: Interpolation key 'nope' not found",
    # options of groups, and recipes
    "accum=atuo": f"accum=atuo: no such option. Did you mean auto? {CUTS}",
    "accum=8": "accum=8: takes the name of an option; set a value with accum.KEY=VALUE. Choices",
    "accum.gradient=summ": "accum.gradient=summ: no such option. Did you mean sum?",
    "hydra/launcher=foo": "hydra/launcher=foo: no such option. Choices: basic",
    "recipe=quickstrat": "recipe=quickstrat: no such option. Did you mean quickstart?",
    "recipe=./none.yaml": "recipe=./none.yaml: no such file",
    # combinations
    "batch.stages=0:64 batch.stages=9k:128": "batch.stages: typed 2 times, as a shell reads braces",
    "verify run=a resume=b": "run, resume: both name a run; type run= to read one",
    # metrics
    "checkpoint.best=eval_acc": "no such metric is known. Did you mean eval_accuracy? For one of",
    "-m seed=1,2 stop.metric=eval_mine": "type checkpoint.mode=min or checkpoint.mode=max",
    # removals
    "~model": "~model: cannot be removed; type model= and another option",
    "~batch.global": "~batch.global: cannot be removed; type batch.global= and another",
    # grammar, words and flags
    "batch.global": "Did you mean batch.global=VALUE?",
    "batch.global=[1": "batch.global=[1: cannot be read",
    "=3": "=3: needs a key",
    "data=text 'data.path=my text [1'": "cannot be read; quote special characters: 'data.path=",
    "-m data=text 'data.path=my text [1'": "cannot be read; quote special characters: 'data.path=",
    "plna": "plna: unknown command. Did you mean plan?",
    "predict": "predict: unknown command. For predictions: train evaluate run=RUN eval.predictions",
    "plan verify": "verify: the command is already plan",
    "--multirn": "--multirn: unknown flag. Did you mean --multirun?",
    "--batch.global 3": "--batch.global: unknown flag. Settings are key=value",
    "--stpes 5": "--stpes: unknown flag. Settings are key=value. Did you mean steps=5?",
    "--per_device_train_batch_size 8": "Did you mean batch.global, samples of all devices",
    "--bf16 true": "Did you mean precision=bf16?",
    "--bf16 false": "--bf16: unknown flag. Settings are key=value. See --help",
    "--load_best_model_at_end true": "Settings are key=value. Did you mean checkpoint.best?",
    "--eval_strategy epoch": "Settings are key=value. Did you mean eval.every?",
    "--report_to none": "--report_to: unknown flag. Settings are key=value. See --help",
    "--learning_rate 1e-3": "Did you mean optimizer.lr=1e-3?",
    "--optim sgd": "Did you mean optimizer=sgd?",
    "--adam_beta1 0.9": "Did you mean optimizer.betas?",
    "--model_name_or_path gpt2": "Did you mean model.path=gpt2?",
    "--num-train-epochs 5": "Settings are key=value. Did you mean epochs=5?",
    "steps= 5": "steps= 5: a setting has no spaces. Did you mean steps=5?",
    "steps =5": "steps =5: a setting has no spaces. Did you mean steps=5?",
    "steps = -5": "steps = -5: a setting has no spaces. Did you mean steps=-5?",
    "steps= plan": "steps=: must be a whole number",
    "--qqz batch.golbal=3": "batch.golbal: unknown setting. Did you mean batch.global?",
    "--steps 0.5 -m seed=1,-2": "seed=-2: must be",
    "--qqq": "--qqq: unknown flag. Settings are key=value; see train --help",
    "--cfg jbo": "--cfg=jbo: no such view. Did you mean job?",
    "--cfg": "--cfg: needs a value",
    "--config-dir nowhere": "nowhere: no such folder",
    # flags of Hydra that are none here
    "--config-path=conf": "config_path: unknown setting",
    "--config-name=other": "config_name: unknown setting",
    "--hydra-help": "--hydra-help: unknown flag. Did you mean --help?",
    "--run": "--run: unknown flag",
    # sweeps, of whichever job
    "-m accum=fixed,atuo accum.micro=8": "accum=atuo: no such option. Did you mean auto?",
    "-m hydra/sweeper=basic accum=auto,fixed accum.micro=null,8": "accum.micro=null: accum=fixed",
    "-m seed=1,2 hydra/sweeper=optuna hydra.sweeper.direction=maximize": "type sweep.mode=min or",
    "-m seed=1,2 resume=some/run": "use resume=auto",
    "hydra.mode=MULTIRUN seed=1,-2": "seed=-2: must be",
    "-m 'optimizer.lr=interval(-1,1)'": "optimizer.lr=-1.0: must be",
    "-m 'accum=glob(z*)'": f"accum=z*: no such option. {CUTS}",
    "evaluate -m run=a,b": "-m: a sweep can only train",
}

ONE_LINE = (
    "--stpes 5",
    "steps= 5",
    "steps = -5",
    *(line for line in MISTAKES if "my text" in line),
)

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


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.parametrize(("line", "text"), MISTAKES.items(), ids=MISTAKES)
def test_a_mistake_is_one_line_with_the_remedy_and_starts_nothing(
    line: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shell(line) == 2
    lines = faults(capsys.readouterr().err)
    assert any(text in fault for fault in lines), lines
    assert all(len(fault) <= 200 for fault in lines)
    assert len(lines) == 1 or line not in ONE_LINE
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("argument", ABSURD, ids=lambda argument: argument[:24])
def test_what_no_program_could_take_is_one_line_too(
    argument: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shell(argument) in (2, 4)
    lines = faults(capsys.readouterr().err)
    assert lines
    assert all(len(line) <= 200 for line in lines)


def test_all_faults_come_at_once_whatever_plus_signs_are_typed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
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
    "data.token=abc",
    "++model.hub_token=abc",
    "wandb.project=ghp_abcdefghijklmnopqrstuvwxyz0123456789",
    "'data.path=${oc.env:WANDB_API_KEY}'",
    "hydra.job.env_set.WANDB_API_KEY=abc",
    "hydra.run.dir=a/very-secret-111222",
    "hydra.sweep.subdir=very-secret-111222",
)


def test_a_secret_is_refused_and_not_repeated_and_words_that_sound_like_one_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_of_many_ranks_the_first_complains_and_none_sweeps(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert shell("-m seed=1,2") == 2
    (fault,) = faults(capsys.readouterr().err)
    assert fault == "-m: a sweep starts its own ranks; run it without torchrun"
    monkeypatch.setenv("RANK", "1")
    assert shell("batch.golbal=3") == 2
    assert capsys.readouterr().err == ""


def test_nothing_heavy_is_imported_before_a_config_is_valid(tmp_path: Path) -> None:
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
def test_a_path_that_cannot_be_is_not_there_and_no_traceback(
    odd: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_a_nul_character_is_named_with_its_key(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("odd.yaml").write_text('data: {path: "a\\0b"}\n')
    assert run(["recipe=./odd.yaml", "data=text"]) == 2
    assert "data.path: holds a NUL character" in capsys.readouterr().err
    assert run(["data.path=a\0b"]) == 2
    assert "holds a NUL character" in capsys.readouterr().err


def test_a_deleted_folder_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert shell("steps=3") == 2
    (fault,) = faults(capsys.readouterr().err)
    assert fault == "the current folder was deleted; change to one that exists"


@pytest.mark.parametrize("content", ["", "not: a list"])
def test_a_run_without_its_overrides_says_what_holds_them(
    content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shell(f"{' '.join(overrides('steps=1'))} hydra.run.dir=run") == 0
    Path("run/.hydra/overrides.yaml").write_text(content)
    capsys.readouterr()
    for line in ("resume=run steps=2", "evaluate run=run"):
        assert shell(line) == 2
        (fault,) = faults(capsys.readouterr().err)
        assert "overrides.yaml: " in fault
        assert "it holds a list of overrides, `[]` for none" in fault
