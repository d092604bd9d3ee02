"""What README.md and docs/ say: commands are valid and run, pages are short, links lead on."""

import json
import logging
import re
import runpy
import shutil
import textwrap
from pathlib import Path

import pytest

from tests.lib import docs_support
from tests.lib.cli_support import CHECKOUT
from tests.lib.docs_support import DOCS, HOW_TO, PAGES, blocks_of, lines_of, stand_in
from tests.lib.nightly import slow
from trainer.features.hugging_face.formats import recognise

README = PAGES["README.md"].read_text()
TYPED = {name: lines for name, path in PAGES.items() if (lines := lines_of(path.read_text()))}
BY_DEFAULT = {"README.md", "docs/tutorials/first-run.md"}
"""Pages whose commands run in every run of the tests; those of the others are `slow`."""

MADE = runpy.run_path(str(DOCS / "generate.py"))["pages"]()
GENERATED = {str(path.relative_to(CHECKOUT)) for path in MADE} | {"docs/coming-from/all-words.md"}
SAID = {  # a page, and what other trainers and newcomers call it; it begins with those words
    "explanation/cutting": "gradient accumulation",
    "how-to/adapters": "LoRA, PEFT",
    "how-to/batch-size": "effective batch size",
    "how-to/chat": "SFT",
    "how-to/checkpoints": "early stopping",
    "how-to/contrastive": "embeddings",
    "how-to/distill": "distillation",
    "how-to/experts": "mixture of experts",
    "how-to/export": "model card",
    "how-to/find-runs": "experiment",
    "how-to/fit-memory": "gradient checkpointing, out of memory",
    "how-to/formats": "dataset, CSV",
    "how-to/go-faster": "profiler",
    "how-to/hold-out": "validation",
    "how-to/hooks": "callback",
    "how-to/image-text": "multimodal",
    "how-to/images": "image classifier",
    "how-to/learning-rate": "scheduler, weight decay",
    "how-to/look-inside": "NaN, debugging",
    "how-to/mixtures": "curriculum",
    "how-to/notebook": "Jupyter",
    "how-to/precision": "mixed precision",
    "how-to/predict": "inference, prediction",
    "how-to/preferences": "DPO",
    "how-to/pretrained-images": "transfer learning",
    "how-to/resume": "continue training",
    "how-to/several-gpus": "distributed training, multi-GPU",
    "how-to/several-hosts": "multi-node, NCCL",
    "how-to/share-a-recipe": "config file",
    "how-to/slurm": "cluster",
    "how-to/spikes": "loss spike",
    "how-to/start-from": "warm start",
    "how-to/sweep": "hyperparameter",
    "how-to/text": "fine-tune, finetune",
    "how-to/text-pairs": "triplets, sentence-transformers",
    "how-to/trackers": "experiment tracking",
    "tutorials/first-run": "pretraining",
}
PAIRS = [(page, word) for page, words in SAID.items() for word in words.split(", ")]


@pytest.fixture(scope="module")
def workshop(request, tmp_path_factory):
    """What the commands of those pages need that this session asks for."""
    folder = tmp_path_factory.mktemp("workshop")
    items = (getattr(item, "callspec", None) for item in request.session.items)
    pages = {item.params.get("page") for item in items if item}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        if pages & TYPED.keys() <= BY_DEFAULT:
            docs_support.make_workshop("llama")
        else:
            docs_support.make_workshop()
            docs_support.furnish_workshop()
    return folder


def test_nothing_stands_in_for_what_a_clone_holds(workshop):
    names = {path.name for path in CHECKOUT.iterdir()} - {"outputs"}  # which runs write into
    for path in workshop.iterdir():
        assert path.name not in names or path.resolve() == CHECKOUT / path.name


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning:torch")  # of what it compiles
# joblib renews a process that grew, and warns; an error would end the thread that renews it.
@pytest.mark.filterwarnings("ignore:A worker stopped while some jobs:UserWarning")
@pytest.mark.parametrize(
    "page", [name if name in BY_DEFAULT else slow(name) for name in sorted(TYPED)]
)
def test_the_commands_of_the_page_run_one_after_the_other(page, workshop, monkeypatch):
    stand_in(workshop, page, monkeypatch)
    for name in docs_support.RESULTS:
        shutil.rmtree(name, ignore_errors=True)
    for line, code in TYPED[page]:
        docs_support.run(line, code, monkeypatch)


def prose_of(text: str) -> str:
    """Give the sentences of a page: no code, no tables, no headings."""
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S)
    kept = [
        line
        for line in text.splitlines()
        if not line.lstrip().startswith(("|", "#", ":::")) and not line.startswith("    ")
    ]
    text = re.sub(r"^\s*(?:[*-]|\d+\.) ", ". ", "\n".join(kept), flags=re.M)
    text = re.sub(r"`[^`]*`", "code", text)
    return re.sub(r"\]\([^)]*\)", "]", text)


@pytest.mark.parametrize("page", sorted(PAGES.keys() - GENERATED))
def test_sentences_are_short_and_how_to_pages_have_sixty_lines(page):
    text = PAGES[page].read_text()
    sentences = [s.split() for s in re.split(r"[.!?](?:\s|$)|\n\n", prose_of(text)) if s.split()]
    average = sum(map(len, sentences)) / max(1, len(sentences))
    assert average <= 20, f"{average:.1f} words a sentence"
    assert page not in HOW_TO or page.endswith("index.md") or len(text.splitlines()) <= 60


def test_the_readme_is_short_and_leads_to_files_that_are_there():
    assert len(README.splitlines()) <= 170
    assert len(README.encode()) <= 10_000
    named = re.findall(r"`(trainer/[\w/]+\.py)`", README)
    assert len(named) >= 5
    assert all((CHECKOUT / name).is_file() for name in named)
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        for target in re.findall(r"\]\(([^)#:]+)[^):]*\)", (CHECKOUT / name).read_text()):
            assert (CHECKOUT / target).exists(), f"{name}: {target}"


def test_the_loop_in_the_readme_is_the_source():
    (loop,) = (each.text for each in blocks_of(README) if "loss.backward()" in each.text)
    source = (CHECKOUT / "trainer" / "accumulate" / "sum.py").read_text()
    assert loop in source or textwrap.indent(loop, " " * 8) in source


def test_pages_of_keys_and_recipes_are_what_the_program_gives():
    found = {path: path.read_text() for path in MADE if path.is_file()}
    assert found == MADE, "run `python docs/generate.py`"
    assert {*(DOCS / "configuration").glob("*.md")} <= MADE.keys()


def first_sentences(page: str) -> str:
    """Give what stands ahead of the second heading of a page, in lower case."""
    head = (DOCS / f"{page}.md").read_text().split("\n## ")[0]
    return " ".join(prose_of(head).lower().split())


def test_first_sentences_have_the_words_of_other_trainers():
    found = {page: first_sentences(page) for page in SAID}
    assert [pair for pair in PAIRS if pair[1].lower() not in found[pair[0]]] == []


def test_messages_that_are_explained_are_those_of_the_program():
    listed = runpy.run_path(str(DOCS / "messages.py"))
    templates = [
        text for file in listed["PACKAGE"].rglob("*.py") for _, text in listed["templates"](file)
    ]
    page = (DOCS / "troubleshooting.md").read_text()
    explained = re.findall(r"^\| `([^`]+)`", page, re.M)
    assert len(explained) >= 50
    for message in explained:
        parts = [part.strip() for part in message.split("...")]
        assert any(all(part in text for part in parts) for text in templates), message


def test_every_example_of_a_format_is_recognised_for_the_task_beside_it():
    page = (DOCS / "how-to" / "formats.md").read_text()
    rows = re.findall(r"^\| `(\{.*\})` \| (`[a-z_`, ]+) \|", page, re.M)
    assert len(rows) >= 12
    for example, tasks in rows:
        for task in tasks.replace("`", "").split(", "):
            assert not recognise("formats.md", [*json.loads(example)], task).unread


def test_code_names_pages_that_are_there():
    folders = ("trainer", "conf", "recipes", "benchmarks", "tests")
    sources = (path for folder in folders for path in (CHECKOUT / folder).rglob("*.[py]*"))
    named = {
        (str(path), name)
        for path in sources
        if path.suffix in {".py", ".yaml"} and path.name != Path(__file__).name
        for name in re.findall(r"docs/[\w/.-]+\.md", path.read_text())
    }
    assert len(named) >= 5
    assert [pair for pair in named if not (CHECKOUT / pair[1]).is_file()] == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_site_builds_without_a_warning_and_asks_no_other_host(tmp_path, monkeypatch, caplog):
    from mkdocs.commands.build import build  # noqa: PLC0415 - a second
    from mkdocs.config import load_config  # noqa: PLC0415

    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    monkeypatch.chdir(CHECKOUT)
    with caplog.at_level(logging.WARNING, "mkdocs"):
        build(load_config(str(CHECKOUT / "mkdocs.yml"), site_dir=str(tmp_path)))
    assert caplog.messages == []
    pages = [path.read_text() for path in tmp_path.rglob("*.html")]
    assert len(pages) > len(PAGES) // 2
    index = json.loads((tmp_path / "search" / "search_index.json").read_text())
    heads = {entry["location"]: entry["text"].lower() for entry in index["docs"]}
    assert [pair for pair in PAIRS if pair[1].lower() not in heads[f"{pair[0]}.html"]] == []
    loaded = re.findall(r"<(?:script|link|img)[^>]+https?:[^>]+", "\n".join(pages))
    assert [tag for tag in loaded if "canonical" not in tag] == []
