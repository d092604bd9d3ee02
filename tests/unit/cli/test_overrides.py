"""What is typed is read as it is meant: of two values the last, and paths below home."""

from pathlib import Path

from tests.lib.cli_support import prepared
from trainer.cli.overrides import parse


def test_of_a_key_that_is_typed_twice_the_last_value_counts_and_a_line_says_so(capsys):
    line = (
        "optimizer.lr=1 accum=auto +steps=3 optimizer.lr=2 accum=fixed accum/gradient=auto "
        "accum.gradient=sum accum.micro=2 ++steps=7 eval.every=2 eval.every=null hydra.run.dir=a "
        "hydra.run.dir=b"
    )
    job = prepared(line)
    config = job.config
    assert (config.optimizer.params["lr"], config.steps, config.eval.every) == (2.0, 7, None)
    assert (config.accum.name, config.accum.gradient.name) == ("fixed", "sum")
    assert job.folder == Path("b").absolute()
    keys = "optimizer.lr", "accum", "steps", "accum.gradient", "eval.every", "hydra.run.dir"
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"train: {key}: typed 2 times; the last one counts" for key in keys]


def test_a_tilde_is_ones_home_wherever_a_value_begins_with_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", home := str(tmp_path))
    expected = {
        "data.path=~": home,
        "data.path='~/c d.txt'": f"{home}/c d.txt",
        "++data.data_files=[~/a, '~/b','c~']": [f"{home}/a", f"{home}/b", "c~"],
        "data.sources={a: {path: ~/a, weight: 2}}": {"a": {"path": f"{home}/a", "weight": 2}},
        "log.generate=['to ~/c', \"see ~/c\"]": ["to ~/c", "see ~/c"],
        "data.path='~nobody-of-this-name/c'": "~nobody-of-this-name/c",
    }
    for line, value in expected.items():
        (override,), faults = parse([line])
        assert (override.value(), faults) == (value, []), line
    (swept,), _ = parse(["data.path=~/a,~/b"])
    assert [*swept.sweep_string_iterator()] == [f"'{home}/a'", f"'{home}/b'"]


def test_commands_take_paths_below_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "c.txt").write_text("some text\n" * 40)
    job = prepared("data=text data.path=~/c.txt outputs=~/runs")
    assert job.config.data.params["path"] == str(tmp_path / "c.txt")
    assert job.folder.is_relative_to(tmp_path / "runs")
    assert prepared("hydra.run.dir=~/run").folder == tmp_path / "run"
