"""The pages of the documentation, the commands in them, and files to run those on."""

import json
import re
import runpy
import shlex
import shutil
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.lib.cli_support import CHECKOUT
from tests.lib.hf_toys import TEXTS, save_job_files, write_lines
from tests.lib.run_support import shell, small_library

DOCS = CHECKOUT / "docs"
PAGES = {
    str(path.relative_to(CHECKOUT)): path for path in (CHECKOUT / "README.md", *DOCS.rglob("*.md"))
}
HOW_TO = [name for name in PAGES if name.startswith("docs/how-to/")]
NOT_RUN = {"shell", "cluster", "gpu"}
"""Marks of a block, ```{.sh .cluster}, whose lines are not run here; `.exit-9` is how it ends."""

INSTALLS = ("python3 -m venv", "pip ")
SMALL = {"steps": "2", "batch.global": "8", "device": "cpu", "wandb.mode": "disabled"}
PAGES_OF_TEXT = {"doctor", "hosts", "ls", "recipes", "report", "rm"}
"""Commands that compose no config."""

RESULTS = ("weights", "adapter", "base")
"""Folders that commands of the pages write, and others read."""

OF_CLONE = ("README.md", "docs")
"""What pages name that a clone holds; nothing stands in for that."""

OTHERS = {"model._target_", "recipe", "model.path", "model.config"}
# An evaluation of all that is held out would take minutes for a vocabulary of 50,257.
TINY = {"model.width": "16", "model.num_heads": "2", "model.num_layers": "1", "eval.samples": "16"}
_FENCE = re.compile(r"^( *)```(?:\{\.)?(\w+)([^\n`}]*)\}?\n(.*?)^ *```", re.M | re.S)


@dataclass(frozen=True)
class Block:
    language: str
    marks: frozenset[str]
    text: str


def blocks_of(text: str) -> list[Block]:
    return [
        Block(language, frozenset(marks.replace(".", " ").split()), textwrap.dedent(indent + inner))
        for indent, language, marks, inner in _FENCE.findall(text)
    ]


def lines_of(text: str) -> list[tuple[str, int]]:
    """Give each line of a page that is typed, and its exit code; not those that only install."""
    typed = [
        (line, max((int(mark.removeprefix("exit-")) for mark in block.marks), default=0))
        for block in blocks_of(text)
        if block.language == "sh" and not block.marks & NOT_RUN and block.text[:2] != "#!"
        for line in block.text.replace("\\\n", "").splitlines()
    ]
    parts = ((shlex.join(shlex.split(line, comments=True)), code) for line, code in typed)
    return [pair for pair in parts if pair[0] and not pair[0].startswith(INSTALLS)]


def write_files_of(text: str) -> None:
    """Write the blocks that begin with a file's name, `# mine.py`, into the current folder."""
    for block in blocks_of(text):
        if named := re.match(r"# ([\w./-]+\.(?:py|yaml))\n", block.text):
            path = Path(named[1])
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)


def make_workshop(*models: str) -> None:
    """Write into the current folder what README and the tutorials name: models, texts."""
    save_job_files(*models)
    corpus = Path("corpus.jsonl")
    corpus.write_text("".join(json.dumps({"text": t, "body": t}) + "\n" for t in TEXTS * 3))
    for name in OF_CLONE:
        Path(name).symlink_to(CHECKOUT / name)


def furnish_workshop() -> None:
    """Write what the other pages name, too: images, records of other kinds, a run `RUN`."""
    import datasets  # noqa: PLC0415 - seconds, of every process that collects tests
    import numpy as np  # noqa: PLC0415
    import transformers  # noqa: PLC0415

    from tests.lib.picture_toys import draw_pictures, save_llava, save_vit  # noqa: PLC0415

    datasets.Dataset.from_json("pairs.jsonl").to_parquet("pairs.parquet")
    corpus = Path("corpus.jsonl")
    for name in ("a", "b", "web", "code", "other"):
        shutil.copy(corpus, f"{name}.jsonl")
    shutil.copy("reviews.csv", "new.csv")
    Path("book.txt").write_text("\n\n".join(TEXTS * 3) + "\n")
    for folder in ("web", "books"):
        Path(folder).mkdir()
        for i, text in enumerate(TEXTS):
            Path(folder, f"{i}.txt").write_text(text)
    both = [{"prompt": "find", "chosen": f" {t}", "rejected": f" {t[::-1]}"} for t in TEXTS]
    write_lines(Path("preferences.jsonl"), both)
    write_lines(Path("text_pairs.jsonl"), [{"anchor": t, "positive": t[::-1]} for t in TEXTS])
    scored = [f"{text},{text[::-1]},{i % 6}" for i, text in enumerate(TEXTS)]
    Path("scored_pairs.csv").write_text("\n".join(["sentence1,sentence2,score", *scored]) + "\n")
    np.arange(20_000, dtype=np.uint16).tofile("tokens.bin")
    for part in ("train", "val"):
        draw_pictures(Path("photos", part))
    save_vit(Path("vit"))
    save_llava(Path("llava"), image_size=336, patch_size=14)
    pictures = sorted(Path("photos").rglob("*.png"))
    captions = [{"image": str(file), "prompt": "a", "completion": " digit"} for file in pictures]
    write_lines(Path("captions.jsonl"), captions)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 320}
    mixtral = transformers.MixtralConfig(
        **sizes, num_local_experts=2, max_position_embeddings=64, output_router_logits=True
    )
    mixtral.architectures = ["MixtralForCausalLM"]
    mixtral.to_json_file("mixtral.json")
    small = shlex.join(f"{key}={value}" for key, value in {**SMALL, **TINY}.items())
    line = "data=text data.path=corpus.jsonl checkpoint.every=1 ema.decay=0.9 eval.every=1"
    kept = "checkpoint.keep=9 checkpoint.best=eval_loss hydra.run.dir=outputs/0/run"
    assert shell(f"{line} {kept} {small}") == 0
    for name in ("RUN", "RUN_A", "RUN_B"):
        Path(name).symlink_to("outputs/0/run")
    assert shell(f"export run=RUN export.to={RESULTS[0]}") == 0
    for name in RESULTS[1:]:
        shutil.copytree("llama", name)


def _smaller(word: str, goes_on: object, typed: Mapping[str, str]) -> str:
    """Make one setting small; `typed` are all of the line."""
    key, _, value = word.partition("=")
    number = int(value) if value.isdecimal() else 0
    if key == "step" and number:
        return "step=1"
    if key == "data.skip_steps":
        return "data.skip_steps=2"
    if key == "steps" and number > 8:
        return f"steps={9 if goes_on else 2}"
    if key == "batch.global" and number > 64:
        return f"batch.global={256 if typed.get('batch.unit') == 'tokens' else 16}"
    return word


def made_small(line: str) -> list[str]:
    """Give what is typed behind `train`, in a size that takes a second."""
    words = [word for word in shlex.split(line)[1:] if not word.startswith("epochs=")]
    typed = dict(word.partition("=")[::2] for word in words if not word.startswith("-"))
    goes_on = {"run", "resume"} & typed.keys() and "-m" not in words  # a sweep has to be the same
    words = [_smaller(word, goes_on, typed) for word in words]
    if goes_on or {*words} & PAGES_OF_TEXT:
        return words  # the settings are the run's
    sizes = dict(SMALL)
    if "logger" in typed:
        del sizes["wandb.mode"]  # a setting of what may not be listed
    if typed.get("model") == "resnet":
        sizes |= {"model.width": "4", "model.depth": "1", "batch.global": "32"}
    elif typed.get("model", "gpt").startswith("gpt") and not OTHERS & typed.keys():
        sizes |= TINY
    if "hydra/launcher" in typed:  # processes that the patch of `small_library` does not reach
        sizes |= {"data": "text", "data.path": str(Path("corpus.jsonl").absolute())}
    if {"-m", "batch=ramp", "batch=noise_ramp"} & {*words} or "accum.steps" in typed:
        del sizes["batch.global"]
    return [*words, *(f"{key}={value}" for key, value in sizes.items() if key not in typed)]


def run(line: str, code: int, patch: pytest.MonkeyPatch) -> None:
    """Run a line of a page in this process, in a small size."""
    first, *words = shlex.split(re.sub(r"run=outputs/\S+", "run=RUN", line))
    if first == "train":
        assert shell(shlex.join(made_small(shlex.join([first, *words])))) == code, line
    elif first == "pytest":
        tests = runpy.run_path(words[0])
        found = [test for name, test in tests.items() if name.startswith("test_")]
        assert found
        for test in found:
            test()
    elif first == "python" and Path(words[0]).is_file():  # a file of the page
        runpy.run_path(words[0])
    else:
        assert (first, words[0]) == ("python", "recipes/example_data.py"), f"{line}: unknown here"
        source = SimpleNamespace(get_paths=lambda: {"stdlib": str(Path("documented").absolute())})
        write_documented(Path("documented"))
        patch.setitem(sys.modules, "sysconfig", source)
        runpy.run_path(str(CHECKOUT / words[0]))["main"](Path(words[1]))
        patch.delitem(sys.modules, "sysconfig")


def write_documented(folder: Path) -> None:
    """Write a small library of documented functions, as `recipes/example_data.py` reads one."""
    for i in range(8):
        package = folder / f"p{i}"
        package.mkdir(parents=True, exist_ok=True)
        functions = (
            f'def f{j}():\n    """{TEXTS[(i * 11 + j) % 60]} {j}, long enough to be taken."""\n'
            for j in range(30)
        )
        (package / "__init__.py").write_text("\n".join(functions))


def stand_in(workshop: Path, page: str, patch: pytest.MonkeyPatch) -> None:
    """Copy the workshop into the current folder, and write the files of a page."""
    shutil.copytree(workshop, Path(), dirs_exist_ok=True, symlinks=True)
    patch.syspath_prepend(str(Path.cwd()))
    small_library(patch)
    write_files_of(PAGES[page].read_text())
