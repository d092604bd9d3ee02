"""Read records in the formats of the field, and give them as a model's tokenizer encodes them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, final

import numpy as np

from trainer.config import components
from trainer.core.errors import ConfigError, DataError
from trainer.core.rows import Row, RunFacts
from trainer.data.chat import LearnedAnswers
from trainer.data.collate import WEIGHT, stack_rows
from trainer.data.documents import WEIGHTED_HEAD, FieldSamples, TextSamples, TwoSides, samples_of
from trainer.data.samples import DataFacts, DataRecord
from trainer.data.split import HOLDOUT, TRAIN, held_out_mask
from trainer.features.hugging_face.all_records import all_records
from trainer.features.hugging_face.chat_encoder import prompt_tokens
from trainer.features.hugging_face.choose_encoder import EncodeOptions
from trainer.features.hugging_face.record_summary import (
    COUNTED,
    classes_row,
    count_classes,
    record_rows,
)
from trainer.features.hugging_face.records import find_records
from trainer.features.hugging_face.token_cache import cached_records, vocabulary_digest
from trainer.features.hugging_face.tokenizers import ends_of, pad_token_of, read_template

DEFAULT_LENGTH = 1024


@final
class HuggingFaceData(TwoSides):
    """Records of a file, a folder or the hub, tokenised once into a cache.

    What a record becomes depends on its columns, and on what the model is made for:
    `conf/hugging_face.yaml` has the columns of each format, and the encoders say what they give.
    Labels are -100 where a token is no loss term. Choices, pairs of texts and pairs of answers are
    `(rows, time)`, and as long as all of their rows, padded to the longest.

    Records are held out by their ids, so that copies of one, and all samples of a document, stay
    on one side; so do pairs with one first text, and answers to one prompt. A source that brings
    parts, such as `train` and `validation`, keeps them.

    The keys of `conf/data/hf.yaml` say what the arguments are. Of the others, `task`,
    `max_positions` and `model_labels` are what the config of the model says; `label_names` are
    classes in their order, none of them where they are numbers. Without `learns` no record needs
    what is learned, all are of one part, and columns are those of `trained_format`. That is how a
    run's records were read; its scale of scores, and meaning of labels, hold in others too.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the keys of `data`
        self,
        path: components.PathOrName,
        tokenizer: Any,  # noqa: ANN401 - whatever the tokenizer is
        task: components.Task | None = None,
        max_positions: int | None = None,
        model_labels: Sequence[str] | None = None,
        label_names: Sequence[str] | None = None,
        subset: components.NameInPath | None = None,
        part: components.NameInPath | None = None,
        columns: components.ColumnNames | None = None,
        filter: components.NamedValues | None = None,
        max_length: components.Pair | None = None,
        overlong: components.Overlong | None = None,
        truncation: Literal["right", "left"] = "right",
        holdout: components.Share = HOLDOUT,
        seed: int = 0,
        max_samples: components.Count | None = None,
        answers: LearnedAnswers = "all",
        assistant_only_loss: bool = True,
        completion_only_loss: bool = True,
        chat_template: components.ExistingPath | None = None,
        chat_template_kwargs: components.NamedValues | None = None,
        on_bad: Literal["stop", "skip"] = "stop",
        learns: bool = True,
        trained_format: Mapping[str, Any] | None = None,
        objective: str | None = None,
    ) -> None:
        # Set, it also spares processes that are forked later a warning of the library.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        # Where nothing is stated `model_max_length` is 10^30.
        limits = (DEFAULT_LENGTH, getattr(tokenizer, "model_max_length", None), max_positions)
        self._max_length = max_length or min(each for each in limits if each)
        self._tokenizer = tokenizer
        template, variables = read_template(chat_template), dict(chat_template_kwargs or {})
        self._template = {"chat_template": template, **variables}
        self._vocabulary = vocabulary_digest(tokenizer)
        if (trained_format or {}).get("vocabulary") not in {None, self._vocabulary}:
            raise ConfigError(
                "tokenizer: has other words than the run was trained with; type "
                "tokenizer.path=FOLDER, with that of the run"
            )
        self._trained = trained_format or {}
        names = tuple(label_names) if label_names is not None else None
        options = EncodeOptions.for_objective(
            objective,
            task=task or "causal_lm",
            columns=dict(columns or {}),
            filter_by=dict(filter or {}),
            model_labels=tuple(model_labels or ()),
            label_names=names,
            max_samples=max_samples,
            max_length=self._max_length,
            overlong=overlong,
            of_answers={
                "truncation": truncation,
                "answers": answers,
                "assistant_only_loss": assistant_only_loss,
                "completion_only_loss": completion_only_loss,
                "chat_template": template,
                "chat_template_kwargs": variables,
            },
            learns=learns,
            trained_format=None if learns else trained_format,
            pair_rule=self._trained.get("pairs") or {},
        )
        one_part_only = part is not None and holdout == 0
        self._source = find_records(path, subset, part, one_part_only=one_part_only, learns=learns)
        self._unused = dict[str, str]()
        if subset is not None and self._source.kind != "hub":
            why = "is of a name on the hub, and the path is a file or folder"
            self._unused["subset"] = why
        self._index = cached_records(self._source, tokenizer, options, skips=on_bad == "skip")
        self._unused |= self._index.facts["unused"]
        self._split, self._samples = TRAIN, self._laid_out(options.task)
        self._learns = learns
        self._hold_out(self._held_out(holdout, seed))
        self._settings = f"{self._samples.settings}|{self._holdout!r}|{seed}"
        if not len(self):
            raise DataError(f"data.path={path}: no record is left")

    def facts(self) -> DataFacts:
        """Add what the cache and the tokenizer know."""
        known, pad_token = self._index.facts, pad_token_of(self._tokenizer)
        collate = None
        # Samples of several rows, as of choices, are padded to the longest row of all.
        if any(isinstance(kind, int) for kind in known.get("kinds", {}).values()):
            collate = partial(stack_rows, pad_token)
        counts = None
        if known.get("label_kind") in COUNTED:
            counts = partial(count_classes, self._index, self.original_ids)
        return replace(
            super().facts(),
            collate=collate,
            vocab_size=len(self._tokenizer),
            num_classes=known.get("num_classes"),
            pad_token_id=pad_token,
            max_length=self._max_length,
            label_kind=known.get("label_kind"),
            label_names=known.get("label_names"),
            class_counts=counts,
            decode_answer=self.decode_answer,
            name_of=self.name_of,
            record_format={
                "name": known["format"],
                "columns": known["columns"],
                "vocabulary": self._vocabulary,
                "pairs": known.get("pair_rule"),
            },
            predicted_table=self._source.table,
            unused=self._unused,
        )

    def _laid_out(self, task: str) -> TextSamples | FieldSamples:
        """Give the samples of the cache."""
        facts = self._index.facts
        if facts["format"] != "text":
            return FieldSamples(self._index, facts["kinds"])
        ends = ends_of(self._tokenizer, is_causal=task == "causal_lm")
        if self._max_length <= len(ends) * ends.of_samples:
            text = "no more than special tokens; set a larger one"
            raise ConfigError(f"data.max_length={self._max_length}: {text}")
        head = WEIGHTED_HEAD if WEIGHT in facts["kinds"] else 1
        return TextSamples(self._index, ends, self._max_length, facts["overlong"], head=head)

    def _held_out(self, holdout: float, seed: int) -> Any:  # noqa: ANN401 - an array of bool
        """Mark the documents that are held out, and say by what rule."""
        counts = self._index.facts["counts"]
        self._holdout = None
        if not self._learns:
            self._split_rule = "none is held out"
            return np.zeros(len(self._index.groups), dtype=np.bool_)
        if len(counts) > 1:
            if holdout not in {0, HOLDOUT}:
                self._unused["holdout"] = f"is not used where the data have {' and '.join(counts)}"
            self._split_rule = f"parts {' and '.join(counts)} of the data"
            return np.arange(len(self._index.groups)) >= next(iter(counts.values()))
        self._holdout = holdout
        self._split_rule = "whole records, copies of one together, drawn by data.split_seed"
        return held_out_mask(self._index.groups, holdout, seed)

    @staticmethod
    def text_facts(
        tokenizer: Any,  # noqa: ANN401 - whatever the tokenizer is
        data_format: str | None = None,
        chat_template: components.ExistingPath | None = None,
        chat_template_kwargs: components.NamedValues | None = None,
    ) -> DataFacts:
        """Say how a text becomes tokens, and tokens a text without special ones; reads no record.

        `data_format` is what the records were recognised as; not known, a tokenizer with a chat
        template is taken for one of conversations.
        """
        template = {"chat_template": read_template(chat_template), **(chat_template_kwargs or {})}
        return DataFacts(
            vocab_size=len(tokenizer),
            pad_token_id=pad_token_of(tokenizer),
            decode=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
            prompt=lambda text: prompt_tokens(tokenizer, text, data_format or "chat", template),
        )

    def decode(self, ids: Sequence[int]) -> str:
        """Write tokens as text, special ones too."""
        return str(self._tokenizer.decode(ids))

    def decode_answer(self, ids: Sequence[int]) -> str:
        """Write tokens as text, without special ones."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def predicted_records(self) -> Iterator[DataRecord]:
        """Give all records, those that are no samples too; where labels are not read."""
        samples = samples_of(self._samples.documents, self._index)
        return all_records(self._source, self._index.facts, samples, self._trained)

    def prompt(self, text: str) -> tuple[Sequence[int], Sequence[int]]:
        """Write what is asked as the records begin; gives its tokens, and those that end it."""
        return prompt_tokens(self._tokenizer, text, self._index.facts["format"], self._template)

    def name_of(self, i: int) -> str:
        """Name the record of a sample, by its file and line where it has one."""
        left = int(self._samples.documents[self.original_ids[i]])
        for part, runs in self._index.facts["runs"].items():
            for first, count in runs:
                if left < count:
                    return self._source.name_of(part, first + left)
                left -= count
        return f"sample {i}"

    def describe(self, _: RunFacts) -> Sequence[Row]:
        """Say what the records were recognised as, and what became of the others."""
        learns, lengths = self._learns, self._samples.lengths
        rows = record_rows(self._index.facts, lengths, self._max_length, learns=learns)
        rows += self._source.listing.describe()
        if self._index.facts.get("label_kind") in COUNTED:
            rows.append(classes_row(self._index, self.original_ids))
        return rows
