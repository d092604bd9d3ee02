"""What a shell offers for the last word of a line."""

from __future__ import annotations

import pytest

from trainer.cli.argv import to_complete


@pytest.mark.parametrize(
    ("line", "rest", "words"),
    [
        ("train pl", "train pl", ["plan"]),
        ("train -m pl", "train -m pl", ["plan"]),
        ("train batch.global=4  pl", "train batch.global=4 pl", ["plan"]),
        ("train  plan accum=", "train accum=", []),
        ("train steps=5 plan ", "train steps=5 ", []),
        ("train report ", "", ["run=", "to=", "outputs="]),
        ("train report run=./a t", "", ["to="]),
        ("train report run=./", "train run=./", []),
    ],
)
def test_a_command_is_offered_anywhere_and_report_what_it_takes(
    line: str, rest: str, words: list[str]
) -> None:
    assert to_complete(line) == (rest, words)
