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
BY_DEFAULT = {
    *("README.md", "docs/tutorials/first-run.md", "docs/tutorials/prove-a-step.md"),
    "docs/tutorials/your-text.md",
}
"""Pages whose commands run in every run of the tests; those of the others are `slow`."""

MADE = runpy.run_path(str(DOCS / "generate.py"))["pages"]()
GENERATED = {str(path.relative_to(CHECKOUT)) for path in MADE} | {"docs/coming-from/all-words.md"}
SAID = {  # what other trainers, and newcomers, call it; a page that begins with that word
    "callback": "how-to/hooks",
    "early stopping": "how-to/checkpoints",
    "hyperparameter": "how-to/sweep",
    "inference": "how-to/predict",
    "prediction": "how-to/predict",
    "experiment": "how-to/find-runs",
    "model card": "how-to/export",
    "fine-tune": "how-to/text",
    "finetune": "how-to/text",
    "SFT": "how-to/chat",
    "LoRA": "how-to/adapters",
    "warm start": "how-to/start-from",
    "distillation": "how-to/distill",
    "PEFT": "how-to/adapters",
    "dataset": "how-to/formats",
    "CSV": "how-to/formats",
    "validation": "how-to/hold-out",
    "mixed precision": "how-to/precision",
    "gradient checkpointing": "how-to/fit-memory",
    "out of memory": "how-to/fit-memory",
    "gradient accumulation": "explanation/cutting",
    "effective batch size": "how-to/batch-size",
    "scheduler": "how-to/learning-rate",
    "weight decay": "how-to/learning-rate",
    "distributed training": "how-to/several-gpus",
    "multi-GPU": "how-to/several-gpus",
    "experiment tracking": "how-to/trackers",
    "continue training": "how-to/resume",
    "profiler": "how-to/go-faster",
    "NaN": "how-to/look-inside",
    "curriculum": "how-to/mixtures",
    "loss spike": "how-to/spikes",
    "debugging": "how-to/look-inside",
    "multimodal": "how-to/image-text",
    "image classifier": "how-to/images",
    "transfer learning": "how-to/pretrained-images",
    "embeddings": "how-to/contrastive",
    "triplets": "how-to/text-pairs",
    "sentence-transformers": "how-to/text-pairs",
    "DPO": "how-to/preferences",
    "mixture of experts": "how-to/experts",
    "Jupyter": "how-to/notebook",
    "config file": "how-to/share-a-recipe",
    "cluster": "how-to/slurm",
    "pretraining": "tutorials/first-run",
}


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
    missing = [pair for pair in SAID.items() if pair[0].lower() not in first_sentences(pair[1])]
    assert missing == []


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
    assert [word for word, page in SAID.items() if word.lower() not in heads[f"{page}.html"]] == []
    loaded = re.findall(r"<(?:script|link|img)[^>]+https?:[^>]+", "\n".join(pages))
    assert [tag for tag in loaded if "canonical" not in tag] == []
