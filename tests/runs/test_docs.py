"""What README.md and docs/ say: commands are valid and run, pages are short, links lead on."""

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

README = PAGES["README.md"].read_text()
TYPED = {name: lines for name, path in PAGES.items() if (lines := lines_of(path.read_text()))}
BY_DEFAULT = {
    *("README.md", "docs/tutorials/first-run.md", "docs/tutorials/prove-a-step.md"),
    "docs/tutorials/your-text.md",
}
"""Pages whose commands run in every run of the tests; those of the others are `slow`."""

GENERATED = {"docs/configuration.md", "docs/coming-from/all-words.md"}


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
    assert page not in HOW_TO or len(text.splitlines()) <= 60


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


def test_the_reference_of_keys_is_what_the_schema_gives():
    generated = runpy.run_path(str(DOCS / "generate.py"))["page"]()
    assert (DOCS / "configuration.md").read_text() == generated, "run `python docs/generate.py`"


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
    loaded = re.findall(r"<(?:script|link|img)[^>]+https?:[^>]+", "\n".join(pages))
    assert [tag for tag in loaded if "canonical" not in tag] == []
