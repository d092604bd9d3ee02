"""Recognise what records hold by the names of their columns, for the model that is trained."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from trainer.config.components import Task
from trainer.core.errors import ConfigError, DataError

_PAIRS = (
    *(("premise", "hypothesis"), ("sentence1", "sentence2"), ("question1", "question2")),
    *(("question", "sentence"), ("question", "passage"), ("text", "text_pair"), ("text1", "text2")),
)
_LABELLED = [
    *({"text": first, "text_pair": second, "label": "label"} for first, second in _PAIRS),
    *(
        {"text": text, "label": label}
        for text in ("text", "sentence")
        for label in ("label", "labels")
    ),
]
_TARGETS = (
    *(("source", "target"), ("text", "summary"), ("document", "summary"), ("dialogue", "summary")),
    *(("article", "highlights"), ("prompt", "completion"), ("input", "target")),
)
_NEAR = (
    *(("anchor", "positive"), ("query", "positive"), ("query", "document"), ("query", "passage")),
    *(("question", "answer"), ("sentence1", "sentence2")),
)
ENDINGS = ("ending0", "ending1", "ending2", "ending3")
"""Columns of the choices of a record that begins with `sent1` and `sent2`."""

# The usual names of columns by their role, for each format; the first that are all there count.
_CONVENTIONS: Mapping[str, Sequence[Mapping[str, str]]] = {
    "chat": [{"messages": name} for name in ("messages", "conversations", "conversation")],
    "prompt and completion": [{"prompt": "prompt", "completion": "completion"}],
    "instruction": [{"instruction": "instruction", "output": "output"}],
    "text": [{"text": "text"}],
    "label": _LABELLED,
    "tags": [
        {"tokens": tokens, "tags": tags}
        for tokens in ("tokens", "words")
        for tags in ("tags", "ner_tags", "labels", "pos_tags")
    ],
    "span": [{"question": "question", "context": "context", "answers": "answers"}],
    "choices": [
        {name: name for name in ("sent1", "sent2", *ENDINGS, "label")},
        *(
            {"question": "question", "choices": "choices", "answer": a}
            for a in ("answer", "answerKey")
        ),
    ],
    "source and target": [{"source": source, "target": target} for source, target in _TARGETS],
    "pair": [{"anchor": first, "positive": second} for first, second in _NEAR],
}
_OPTIONAL: Mapping[str, Mapping[str, str]] = {
    "chat": {"tools": "tools", "system": "system"},
    "prompt and completion": {"tools": "tools"},
    "instruction": {"input": "input", "system": "system"},
}
"""Columns that are used where they are there, by format."""
_WEIGHTS = ("weight", "weights", "sample_weight", "loss_weight")
_DECISIVE: Mapping[str, Collection[str]] = {
    "chat": ("train", "loss_mask"),
    "prompt and completion": ("label", "system", "history", "loss_mask"),
    "instruction": ("history", "loss_mask"),
    "pair": ("label", "labels", "score", "scores", "similarity", "similarity_score"),
}
"""Columns that nothing reads and without which a record means something else, by format."""

_FORMATS: Mapping[Task, Sequence[str]] = {
    "causal_lm": ["chat", "prompt and completion", "instruction", "text"],
    "masked_lm": ["text"],
    "seq2seq_lm": ["source and target"],
    "sequence_classification": ["label"],
    "token_classification": ["tags"],
    "question_answering": ["span"],
    "multiple_choice": ["choices"],
    "embedding": ["pair"],
}
"""What a model for a task can be trained on, the first that fits first."""


@final
@dataclass(frozen=True)
class Format:
    """What the records of a data set hold."""

    name: str
    columns: Mapping[str, str]  # by role
    unread: Sequence[str] = ()  # the other columns

    def take(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Give the values of a record by role; a ValueError where a column is missing."""
        for role, column in self.columns.items():
            if column not in record and role not in _OPTIONAL.get(self.name, {}):
                has = ", ".join(map(repr, record)) or "none"
                raise ValueError(f"no column {column!r}; it has {has}")
        return {role: record.get(column) for role, column in self.columns.items()}


def recognise(
    place: str,
    columns: Collection[str],
    task: Task,
    typed: Mapping[str, str | None] | None = None,
) -> Format:
    """Find the format of records by their columns, for a model that is made for a task.

    Columns are `typed` by role in place of the usual ones; None under the name of a column leaves
    it out. One that nothing reads, and that changes what a record means, is refused.
    """
    left_out = {column for column, name in (typed or {}).items() if name is None}
    named = {role: column for role, column in (typed or {}).items() if column is not None}
    for column in left_out.difference(columns):
        raise ConfigError(f"data.columns={{{column}:null}}: {_no_column(columns)}")
    if {"chosen", "rejected"} <= {*columns} and not named:
        roles = "{prompt: prompt, completion: chosen}"
        roles = roles if "prompt" in columns else "{messages: chosen}"
        raise DataError(
            f"{place}: preference pairs (chosen, rejected) are not trained on; to learn the chosen "
            f"answers alone, type data.columns={roles}"
        )
    _check_typed(named, columns, task)
    readable = [column for column in columns if column not in left_out]
    for name, usual in _usual(task):
        names = {**usual, **{role: named[role] for role in named if role in usual}}
        found = {role: column for role, column in names.items() if column in readable}
        needed = usual.keys() - _OPTIONAL.get(name, {}).keys()
        if found.keys() >= needed | named.keys():
            for column in (*_DECISIVE.get(name, ()), *_WEIGHTS):
                if column in readable and column not in found.values():
                    raise DataError(
                        f"{place}: column {column!r} changes what a record means, and is not read "
                        f"from records of {name}; to train without it, type "
                        f"data.columns={{{column}:null}}"
                    )
            return Format(name, found, [c for c in columns if c not in found.values()])
    wanted = dict.fromkeys(" and ".join(usual) for _, usual in _usual(task))
    if not wanted:
        raise DataError(f"{place}: data=hf reads nothing for {task}; type data._target_=mine.Class")
    role = "text" if "text" in wanted else next(iter(wanted)).split()[0]
    raise DataError(
        f"{place}: its columns are {', '.join(columns) or 'none'}, and {task} takes "
        f"{' or '.join(wanted)}; say which they are, e.g. "
        f"data.columns={{{role}: {next(iter(columns), 'NAME')}}}"
    )


def _usual(task: Task) -> Iterator[tuple[str, Mapping[str, str]]]:
    for name in _FORMATS.get(task, ()):
        for usual in _CONVENTIONS[name]:
            yield name, {**usual, **_OPTIONAL.get(name, {})}


def _check_typed(typed: Mapping[str, str], columns: Collection[str], task: Task) -> None:
    roles = dict.fromkeys(role for _, usual in _usual(task) for role in usual)
    for role, column in typed.items():
        text = f"data.columns={{{role}: {column}}}"
        if role not in roles:
            raise ConfigError(f"{text}: no such role; for {task} there are {', '.join(roles)}")
        if column not in columns:
            raise ConfigError(f"{text}: {_no_column(columns)}")


def _no_column(columns: Collection[str]) -> str:
    return f"no such column; there are {', '.join(columns)}"
