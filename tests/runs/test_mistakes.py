"""What a mistake is answered with: one line per fault, nothing started, no folder, exit 2."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from tests.lib.cli_support import faults, in_process, make_own_folder, prepared, python

MISTAKES = {
    # keys
    "batch.golbal=512": "batch.golbal: unknown setting. Did you mean batch.global?",
    "model.wdith=64": "model.wdith: unknown setting. Did you mean model.width?",
    "lr=0.1": "lr: unknown setting. Did you mean optimizer.lr?",
    "batch.global.x=3": "batch.global",
    "eval=3": "eval=3: is a section",
    "foo/bar=baz": "foo/bar: unknown group",
    "model@x=gpt_tiny": "model@x: unknown group. Did you mean model?",
    "x@y=1": "x@y: unknown group",
    "optimizer.groups=[a]": "optimizer.groups=[a]: must be a mapping",
    # values
    "batch.global=abc": "batch.global=abc: must be a whole number",
    "batch.global=": "batch.global=: must be",
    "model._target_=Net": "must be the import path of a class",
    "device=gpu": "device=gpu: must be auto, cpu or cuda",
    "wandb.tags.wandb.tags=[a]": "wandb.tags.wandb.tags=[a]: Index",
    "batch.global=8,000": "several values are a sweep, which takes -m",
    "optimizer.lr=nan": "optimizer.lr=NaN: must be a number, 0 or more",
    "precision=fp16": "precision=fp16: must be fp32 or bf16",
    "scheduler.warmup=1000 steps=10": "the largest valid value is 10",
    # arguments of the built-in classes
    "model.num_heads=5": "nearest: model.width=100 or model.num_heads=4",
    "optimizer.groups={a:3}": 'optimizer.groups={"a":3}: must be a mapping of name patterns',
    "optimizer.groups={a:{rl:3}}": "must be a mapping of name patterns to lr, weight_decay",
    "optimizer.groups={a:{lr:-3}}": "must be a mapping of name patterns to lr, weight_decay",
    "'name=my run'": "name=my run: must be one word",
    # options of groups
    "accum=atuo": "accum=atuo: no such option. Did you mean auto? Choices: auto, budget, fixed",
    "accum=": "accum=: no such option. Choices: auto, budget, fixed",
    "accum=8": "accum=8: takes the name of an option; a value is accum.KEY=VALUE. Choices",
    "accum=[auto,fixed]": 'accum=["auto","fixed"]: takes the name of an option',
    "accum.gradient=summ": "accum.gradient=summ: no such option. Did you mean sum?",
    "data=text": "data.path: data=text needs it",
    "model=gpt-tiny": "model=gpt-tiny: no such option. Did you mean gpt_tiny?",
    "model=own": "model",
    "hydra/launcher=foo": "hydra/launcher=foo: no such option. Choices: basic",
    "hydra.run.dri=x": "hydra.run.dri: unknown setting of Hydra",
    # recipes
    "recipe=quickstrat": "recipe=quickstrat: no such option. Did you mean quickstart?",
    "recipe=./none.yaml": "recipe=./none.yaml: no such file",
    # combinations
    "accum=fixed": "accum=fixed needs accum.micro",
    "steps=10 epochs=2": "steps=10: epochs is set too",
    "batch.normalizer=micro_batches": "type accum=fixed accum.micro=8",
    "run=x": "read by evaluate, export and verify; to go on with a run: resume=",
    "evaluate": "command=evaluate: needs run=outputs/... or run=auto",
    "optimizer.lr=1 optimizer.lr=2": "optimizer.lr: given 2 times (optimizer.lr=1, optimizer.lr=2)",
    "accum.gradient=sum accum/gradient=auto": "accum.gradient: given 2 times",
    "plan command=verify": "command: given 2 times",
    "verify run=a resume=b": "run, resume: both name a run; type run= to read one",
    # what is not built is no setting
    "batchnorm.group=32": "batchnorm.group: unknown setting. batchnorm is one value",
    "command=report": "command=report: must be train, plan, verify, evaluate or export",
    "report run=x": "report: unknown command. Did you mean export? Choices",
    # removals
    "~model": "~model: cannot be removed; type model= and another option",
    "~batch.global": "~batch.global: cannot be removed; type batch.global= and another",
    "~model.widht": "~model.widht: Key not found: 'widht'",
    "~foo": "~foo: unknown setting",
    # grammar, words and flags
    "batch.global": "Did you mean batch.global=VALUE?",
    "batch.global=[1": "batch.global=[1: cannot be read",
    "=3": "=3: needs a key",
    "optimizer.lr=1,2": "several values are a sweep, which takes -m",
    "plna": "plna: unknown command. Did you mean plan?",
    "help": "help: unknown command. Did you mean --help?",
    "plan verify": "verify: plan is already the command",
    "mine.yaml": "Did you mean recipe=mine.yaml?",
    "--multirn": "--multirn: unknown flag. Did you mean --multirun?",
    "--batch.global 3": "--batch.global: unknown flag. Settings are key=value",
    "--resume auto": "--resume: unknown flag",
    "batch.global:64": "Did you mean batch.global=64?",
    "batch.global = 3": "batch.global: unknown command. Did you mean batch.global=VALUE?",
    "eval": "Did you mean evaluate?",
    "--config-name nothing": "Cannot find primary config 'nothing'",
    "--cfg jbo": "--cfg=jbo: no such view. Did you mean job?",
    "--cfg": "--cfg: needs a value",
    "--config-dir nowhere": "nowhere: no such folder",
    "--cfg job batch.golbal=3": "Did you mean batch.global?",
    # places
    "outputs=../x": "outputs=../x: must not lead upwards with ..",
    "'outputs=\"~/x\"'": "outputs=~/x: must not lead upwards with .., or begin with ~",
    "hydra.run.dir=../x": "hydra.run.dir=../x: must not lead upwards with ..",
    "name=../x": "name=../x: must",
    "model=../../x": "model=../../x: no such option",
    "model=/etc/passwd": "model=/etc/passwd: no such option",
    # interpolations
    "'batch.global=${nope}'": "batch.global: Interpolation key 'nope' not found",
    "'batch.global=${oc.env:NOT_THERE}'": "batch.global",
}

SECRETS = [
    "data.token=abc",
    "+data.api_key=xyz",
    "++model.hub_token=abc",
    "wandb.project=ghp_abcdefghijklmnopqrstuvwxyz0123456789",
    "name=hf_abcdefghijklmnopqrstuvwxyzABCDEF",
    "'data.path=${oc.env:WANDB_API_KEY}'",
    "hydra.job.env_set.WANDB_API_KEY=abc",
]

NO_SECRETS = [
    "data.max_length=64",
    "model._target_=net.Net model.eos_token=end model.max_tokens=3",
    "model._target_=net.Net model.token_dim=3 model.key_size=4",
    "name=my-sk-learn",
]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.parametrize(("line", "text"), MISTAKES.items(), ids=MISTAKES)
def test_a_mistake_is_one_line_with_the_remedy_and_starts_nothing(
    line: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert in_process(line) == 2
    lines = faults(capsys.readouterr().err)
    assert any(text in fault for fault in lines), lines
    assert all(len(fault) <= 200 for fault in lines)
    assert not list(tmp_path.iterdir())


def test_plus_signs_change_nothing_about_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    answers = set()
    for prefix in ("", "+", "++"):
        line = " ".join(
            f"{prefix}{m}" for m in ("batch.golbal=3", "batch.global=abc", "accum=atuo")
        )
        assert in_process(line) == 2
        answers.add(capsys.readouterr().err)
    assert len(answers) == 1


@pytest.mark.parametrize("line", SECRETS)
def test_a_secret_is_refused_and_not_repeated(
    line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "very-secret")
    assert in_process(line) == 2
    err = capsys.readouterr().err
    assert "looks like a secret" in err
    assert line.strip("'").partition("=")[2] not in err
    assert "very-secret" not in err


def test_words_that_only_sound_like_secrets_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_own_folder(tmp_path, monkeypatch)
    for line in NO_SECRETS:
        prepared(line)


def test_all_faults_come_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    line = "x=[1 accum=atuo batch.golbal=1 optimizer.lr=abc seed=1 seed=2 recipe=./none.yaml"
    assert in_process(line) == 2
    keys = [fault.split(":")[0].split("=")[0] for fault in faults(capsys.readouterr().err)]
    assert sorted(keys) == ["accum", "batch.golbal", "optimizer.lr", "recipe", "seed", "x"]


@pytest.mark.parametrize(
    ("line", "text"),
    {
        "-m accum=fixed,atuo accum.micro=8": "accum=atuo: no such option. Did you mean auto?",
        "-m seed=1,2 resume=some/run": "use resume=auto",
        "-m seed=1,2 batch.golbal=3,4": "batch.golbal: unknown setting",
        "hydra.mode=MULTIRUN seed=1,-2": "seed=-2: must be",
        "-m 'optimizer.lr=interval(-1,1)'": "optimizer.lr=-1.0: must be",
        "-m 'model=glob(*)' model.wdith=3": "model.wdith: unknown setting",
        "-m batch.global=128,0 accum=fixed accum.micro=8,abc": "accum.micro=abc: must be",
        "-m 'accum=glob(z*)'": "accum=z*: no such option. Choices: auto, budget, fixed",
        "-m 'seed=glob(*)'": "seed=*: must be a whole number",
        "evaluate -m run=a,b": "-m: jobs of a sweep make runs and read none",
        "verify -m run=a seed=1,2": "-m: jobs of a sweep make runs and read none",
        "-m seed=1,2 recipe=./none.yaml,quickstart": "recipe=./none.yaml: no such file",
    }.items(),
)
def test_sweeps_have_no_mistakes_of_their_own(
    line: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert in_process(line) == 2
    assert any(text in fault for fault in faults(capsys.readouterr().err))
    assert not list(tmp_path.iterdir())


def test_a_sweep_does_not_run_under_torchrun(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert in_process("-m seed=1,2") == 2
    assert faults(capsys.readouterr().err) == [
        "-m: a sweep starts its own ranks; run it without torchrun"
    ]


def test_only_the_first_rank_complains(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert in_process("batch.golbal=3") == 2
    assert capsys.readouterr().err == ""


def test_nothing_heavy_is_imported_before_a_config_is_valid(tmp_path: Path) -> None:
    lines = {
        "batch.golbal=3": 2,
        "x=[1": 2,
        "-m batch.global=1,0 accum=fixed accum.micro=1": 2,
        "resume=nowhere": 4,
        "plan data=text data.path=no.txt": 3,
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
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["probe.py"]


def test_the_users_wish_for_a_traceback_is_granted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    assert in_process("batch.golbal=3") == 2
    assert "Traceback" in capsys.readouterr().err


LONG = "x" * 5000


@pytest.mark.parametrize(
    "argument",
    [
        *(f"{key}={LONG}" for key in ("init", "resume", "outputs", "hydra.run.dir")),
        f"recipe=/{LONG}.yaml",
        f"data.path={LONG}",
        f"evaluate run={LONG}",
        f"evaluate run=[{LONG},{LONG}]",
        f"resume={'x/' * 4000}",
        *(f"resume={value}" for value in ("1", "true", "[]", "{}")),
        *(f"evaluate run={value}" for value in ("[]", "[null]", "[[a]]", "{}", "1")),
        "command=[train]",
        f"seed={'9' * 5000}",
        "hydra.searchpath=x",
        "resume@z=1e309",
        f"+model.x={'[' * 150}{']' * 150}",
        f"+model.x={'{a:' * 2000}1{'}' * 2000}",
    ],
    ids=lambda argument: argument[:24],
)
def test_what_no_program_could_take_is_one_line_too(
    argument: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert in_process(argument) in (2, 4)
    lines = faults(capsys.readouterr().err)
    assert lines
    assert all(len(line) <= 200 for line in lines)


def test_a_file_here_is_not_taken_for_an_installed_package(tmp_path: Path) -> None:
    (tmp_path / "yaml.py").write_text("raise RuntimeError")
    main = "import sys; sys.argv[0] = 'train'; from trainer.cli.main import main; main()"
    ended = python(f"-P -c {shlex.quote(main)} stepz=1", tmp_path)
    assert ended.returncode == 2, ended.stderr
    assert "stepz" in ended.stderr
