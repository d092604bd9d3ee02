"""Harnesses 24, 25 and 26: what strangers send runs nothing, leads nowhere, and learns nothing."""

import logging
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.lib.config_support import checked
from tests.reliability import lab, toys
from trainer.assemble.instantiate import look_up
from trainer.cli import main as cli
from trainer.config.components import Component
from trainer.core.errors import ConfigError

EVIL = """
import os
from pathlib import Path
from torch import nn
(Path(__file__).parent / "canary").mkdir(exist_ok=True)
class Net(nn.Module):
    pass
"""

TINY = [line for line in lab.lines("steps=1", "eval.every=null") if "hooks" not in line]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's folder with a module that betrays its import, below one that must stay as it is."""
    folder = tmp_path / "home" / "user" / "work"
    folder.mkdir(parents=True)
    (folder / "evil.py").write_text(EVIL)
    (tmp_path / "precious").write_text("precious")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield folder
    sys.modules.pop("evil", None)


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    """List everything below a folder, files with size and time; links are not followed."""
    paths = [path for path in folder.rglob("*") if "__pycache__" not in path.parts]
    found = {str(path.relative_to(folder)): path.lstat() for path in paths}
    files = {name for name, status in found.items() if not stat.S_ISDIR(status.st_mode)}
    return {n: (s.st_size, s.st_mtime_ns) if n in files else (0, 0) for n, s in found.items()}


def assert_refused(argv: list[str], codes: tuple[int, ...], tmp_path: Path, err: object) -> None:
    before = tree(tmp_path)
    code = cli.run(argv)
    screen = err.readouterr().err  # type: ignore[attr-defined]
    assert code in codes, f"{code}: {screen}"
    assert not (Path.cwd() / "canary").exists()
    assert tree(tmp_path) == before
    lines = screen.splitlines()
    assert lines
    assert all(line.startswith("train: error: ") and len(line) <= 215 for line in lines), screen


RECIPES = {
    "a callback of Hydra": "hydra: {callbacks: {x: {_target_: evil.Net}}}",
    "a class of nobody's": "model: {_target_: evil.Net}",
    "a class within": "data: {inner: {_target_: evil.Net}}",
    "a class in a library's": "model: {_target_: torch.nn.Sequential, x: [{_target_: evil.Net}]}",
    "a kernel of the hub": (
        "model: {_target_: transformers.GPT2LMHeadModel, config: {attn_implementation: evil/evil}}"
    ),
    "trust": "trust: [evil]\nmodel: {_target_: evil.Net}",
    "a tag": "model: !!python/object/apply:os.mkdir [canary]",
    "another W&B's team by reference": "name: evil\nwandb: {entity: '${name}'}",
    "a partial call": "model: {_partial_: true}",
}


@pytest.mark.parametrize("what", RECIPES)
def test_a_recipe_runs_nothing_and_writes_nothing(what, place, tmp_path, capsys):
    (place / "friend.yaml").write_text(RECIPES[what])
    key = RECIPES[what].partition(":")[0]
    own = [t for t in TINY if t.partition("=")[0].partition(".")[0] not in (key, "steps", "name")]
    argv = ["recipe=./friend.yaml", "steps=1", *own]
    assert_refused(argv, (2, 3, 4), tmp_path, capsys)


NOT_TRUSTED = {
    "model": "torch.nn.factory_kwargs torch.nn.Parameter torch.optim.SGD torch.nn.functional "
    "torch.nn.modules.module.warnings.warn transformers.AutoModel.from_pretrained os.system "
    "transformers.AutoModelForCausalLM transformers.pipeline trainer.core.durable evil.Net "
    "trainer.core.durable.os.mkdir trainer.assemble.instantiate.construct "
    "trainer.plan.cuts.np.load trainer.training.batches.ThreadPoolExecutor",
    "optimizer": "torch.hub.load torch.optim.lr_scheduler torch.nn.Linear subprocess.run",
    "data": "torch.nn.Sequential torch.load pathlib.Path.write_text urllib.request.urlopen "
    "trainer.core.durable.begin_folder",
    "objective": "builtins.eval",
    "hooks[0]": "os.mkdir torch.nn.Linear",
    "accum": "evil.Cut",
}
"""What a recipe may not name: functions, aliases, and classes that are none for their place."""


def test_what_nobody_typed_is_a_class_of_ours_or_of_a_model_library_for_its_place(place):
    for key, targets in NOT_TRUSTED.items():
        for target in targets.split():
            with pytest.raises(ConfigError, match=re.escape(f"{key}._target_={target}")):
                look_up(Component(target=target), key, ())
    assert look_up(Component(target="torch.nn.Linear"), "model", ()) is torch.nn.Linear
    assert not (place / "canary").exists()


def test_a_recipe_may_name_an_optimizer_of_pytorch(place):
    own = "defaults: [{override /optimizer: own}]\noptimizer: {_target_: torch.optim.SGD, lr: 0.1}"
    (place / "friend.yaml").write_text(own)
    assert cli.run(["recipe=./friend.yaml", *TINY]) == 0


def test_the_canary_sings(place):
    """What the user typed themselves is imported: so the harness would see it."""
    assert cli.run(["model._target_=evil.Net", *[t for t in TINY if "model" not in t]]) != 0
    assert (place / "canary").exists()


@pytest.fixture(scope="module")
def honest_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("honest") / "run"
    assert cli.run([*TINY, f"hydra.run.dir={run}"]) == 0
    return run


def planted(line: str, *more: str) -> Callable[[Path], None]:
    """Put an override among the records of a run, in place of its model."""

    def plant(run: Path) -> None:
        records = run / ".hydra" / "overrides.yaml"
        lines = [each for each in records.read_text().splitlines() if "model" not in each]
        records.write_text("\n".join([*lines, *more, f'- "{line}"']) + "\n")

    return plant


def written(name: str, text: str) -> Callable[[Path], None]:
    def write(run: Path) -> None:
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text(text)

    return write


def linked(name: str) -> Callable[[Path], None]:
    def link(run: Path) -> None:
        target, outside = run / name, run.parents[3] / "precious"
        if target.is_dir():
            outside = Path(shutil.move(target, run.parents[3] / "moved"))
        target.unlink(missing_ok=True)
        target.symlink_to(outside)

    return link


TAG = "!!python/object/apply:os.mkdir [canary]"
FOLDERS = {
    "a folder of Hydra's": planted("hydra.run.dir=../../../x"),
    "trust": planted("trust=[evil]", "- ++model._target_=evil.Net"),
    "a class behind trust": planted("'++objective={_target_: evil.Net}'"),
    "an environment variable": planted("name=${oc.env:HOME}"),
    "no override": planted("]["),
    "a tag in the config": written("config.yaml", TAG),
    "an endless config": written("config.yaml", "&a {batch: *a}"),
}
FOLDERS |= {f"a link for {name}": linked(name) for name in ("metrics.jsonl", "checkpoints")}


def test_a_file_s_name_commands_no_terminal(place, capsys, monkeypatch):
    """A name that clears the screen, sets its title, and turns what follows it around."""
    monkeypatch.setenv("TRAIN_CACHE", str(place / "cache"))
    (place / "texts").mkdir()
    (place / "texts" / "a\x1b[2J\x1b]0;evil\x07\u202e\x9b.txt").write_bytes(b"\xff")
    for number in range(120):
        (place / "texts" / f"{number}.txt").write_text(f"document {number}")
    argv = [line for line in TINY if not line.startswith(("data", "model"))]
    argv += ["data=text", "data.path=texts", "data.max_length=16", "model.width=6"]
    assert cli.run(argv) == 3
    assert cli.run([*argv, "data.on_bad=skip"]) == 0
    screen = capsys.readouterr()
    (log,) = (place / "outputs").glob("*/*/samples.jsonl")
    (shown,) = (place / "outputs").glob(f"*/{log.parent.name}/train.log")
    for text in (screen.out, screen.err, shown.read_text(), log.read_text()):
        assert "x1b" in text or "u001b" in text
        assert all(char.isprintable() or char in "\n\t" for char in text), repr(text)


@pytest.mark.parametrize("what", FOLDERS)
def test_a_run_folder_leads_nowhere(what, honest_run, place, tmp_path, capsys):
    run = place / "run"
    shutil.copytree(honest_run, run)
    FOLDERS[what](run)
    own = [line for line in TINY if "data._target_" in line]
    if what != "trust":
        own += [line for line in TINY if "model._target_" in line]
    assert_refused([f"resume={run}", "steps=2", *own], (2, 4), tmp_path, capsys)


LEADING_OUT = ["outputs=outputs/../../../x", "hydra.run.dir=outputs/../../x"]
LEADING_OUT += ["hydra.sweep.dir=../../x", "hydra.output_subdir=/tmp/somewhere", "model=../../../x"]
LEADING_OUT += ["recipe=../../../none.yaml", "hydra/launcher=../x"]


def test_no_name_is_a_path_or_a_command():
    for value in ("..", "a/b", "a\\b", "a\nb", "a\0b", "`id`", "\uff0e\uff0e", "a" * 300, ""):
        with pytest.raises(ConfigError, match=r"^name="):
            checked({"name": value})
    for value in ("..", "outputs/../../x", "~/x"):
        with pytest.raises(ConfigError, match=r"^outputs="):
            checked({"outputs": value})


@pytest.mark.parametrize("name", LEADING_OUT)
def test_no_name_leads_out_of_the_output_folder(name, tmp_path, capsys):
    key = name.partition("=")[0]
    argv = [line for line in TINY if line.partition("=")[0].partition(".")[0] != key]
    assert_refused([*argv, name], (2,), tmp_path, capsys)


SECRETS = {
    "WANDB_API_KEY": "canary1" + "0a" * 16,
    "HF_TOKEN": "hf_" + "Canary2" * 5,
    "AWS_SECRET_ACCESS_KEY": "canary3/" + "Ab3" * 10,
    "MY_SERVICE_PASSWORD": "canary4-correct-horse-battery",
    "GITHUB_TOKEN": "ghp_" + "canary5X" * 4,
}


def found_in(folder: Path, text: str) -> list[str]:
    """Name the places where a part of any secret stands."""
    everywhere = {"the screen": text.encode()} | {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "evil.py"
    }
    wanted = [secret.encode() for secret in SECRETS.values()]
    return [name for name, content in everywhere.items() for s in wanted if s in content]


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("eval.every=null", 0),
        ("model._target_=tests.reliability.test_hostile_inputs.Blurting", 1),
        ("data._target_=tests.reliability.test_hostile_inputs.Telling", 3),
    ],
)
def test_no_secret_of_the_environment_is_left_anywhere(line, code, tmp_path, monkeypatch, capfd):
    for name, secret in SECRETS.items():
        monkeypatch.setenv(name, secret)
    assert cli.run([*lab.lines("steps=1", line)]) == code
    screen = capfd.readouterr()
    assert found_in(tmp_path, screen.out + screen.err) == []
    if code:
        assert "$HF_TOKEN" in screen.err


class Blurting(toys.Net):
    """A model that puts every secret into the text of an error."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(" ".join(os.environ[name] for name in SECRETS))


class Telling:
    """Data that put every secret into the text of an error."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> object:
        logging.getLogger("library").error("sent %s", os.environ["HF_TOKEN"])
        raise KeyError(" ".join(os.environ[name] for name in SECRETS))


def test_a_secret_that_is_left_somewhere_is_noticed(tmp_path):
    text = f"token {SECRETS['HF_TOKEN']}"
    (tmp_path / "log").write_text(text)
    assert found_in(tmp_path, text) == ["the screen", "log"]
