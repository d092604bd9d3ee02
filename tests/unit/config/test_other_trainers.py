"""What other trainers call a setting: one table of words, explained in `docs/coming-from/`."""

import re
import runpy

import pytest

from trainer.config import recipes, trackers
from trainer.config.components import GROUPS
from trainer.config.keys import KEYS
from trainer.config.messages import flat
from trainer.config.option_files import data_dir, options_of
from trainer.config.other_trainers import _WORDS, NONE_HERE, OTHER_WORDS, REFUSED, hint_for

PAGES = {
    path.stem: path.read_text()
    for path in sorted((data_dir("conf").parent / "docs" / "coming-from").glob("*.md"))
    if path.stem not in {"index", "all-words"}
}
OPTIONS = {group: {*options_of(group)} for group in GROUPS}
OWN = {f"{group}.{key}" for group in GROUPS for keys in options_of(group).values() for key in keys}
KNOWN = {*KEYS, *GROUPS, *OWN, *flat(trackers.options()), "scheduler._target_", "recipe"}


def test_every_setting_that_is_meant_is_one_and_no_word_is_meant_twice():
    called = _WORDS["called"]
    assert {re.match(r"[\w.]+", each)[0] for each in called} <= KNOWN
    lists = (*called.values(), *_WORDS["none"].values(), REFUSED)
    words = [word for theirs in lists for word in theirs]
    assert len(words) == len({*words})
    assert not KNOWN & {*words}
    assert hint_for("trainer.max_steps", ()) == " Did you mean steps?"
    assert hint_for("tp_size", ()) == f" Here {NONE_HERE['tp_size']}"


def test_the_page_of_all_words_is_what_is_answered():
    docs = data_dir("conf").parent / "docs"
    generated = runpy.run_path(str(docs / "coming_from.py"))["page"]()
    page = (docs / "coming-from" / "all-words.md").read_text()
    assert page == generated, "run `python docs/coming_from.py`"
    assert {*OTHER_WORDS, *NONE_HERE, *REFUSED} == {*re.findall(r"^\| `(\w+)`", page, re.M)}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_names_settings_options_and_recipes_that_there_are(name):
    text = PAGES[name]
    rows = [line.split("|")[2] for line in text.splitlines() if line.startswith("| ")][1:]
    settings = [s for row in rows for span in re.findall(r"`([^`]+)`", row) for s in span.split()]
    assert len(rows) >= 15
    for setting in settings:
        key, _, value = setting.partition("=")
        assert key in KNOWN, setting
        assert key not in OPTIONS or key in KEYS or value in OPTIONS[key], setting
    commands = re.findall(r"^train recipe=(\w+)", text, flags=re.MULTILINE)
    assert commands
    assert {*commands} <= {*recipes.available()}
    assert "Silent differences" in text
    assert len(text.splitlines()) <= 60
