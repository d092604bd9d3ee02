"""Tokenise records once, into a cache that is opened ever after."""

from __future__ import annotations

import hashlib
import json
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import KW_ONLY, dataclass, field
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, final

import numpy as np

from trainer.core.errors import DataError
from trainer.core.urls import cache_folder
from trainer.data import index
from trainer.data.documents import SampleKind
from trainer.data.files import progress
from trainer.data.lines import FAULT_COLUMN, fault
from trainer.data.samples import INPUT_IDS
from trainer.features.hugging_face import chat_encoder, encode
from trainer.features.hugging_face.choose_encoder import (
    GROUP_OF,
    OVERLONG,
    EncodeOptions,
    fields_of,
    records_of_parts,
    weighs_samples,
)
from trainer.features.hugging_face.filter import selected_rows
from trainer.features.hugging_face.formats import Format, as_trained, recognise
from trainer.features.hugging_face.records import RecordSource
from trainer.plan.cut import IntArray

_LOOKED_AT = 100
"""Records of JSON whose names are looked at to recognise the format."""
_OTHER_FIELDS = "it has other fields, or another number of choices, than the first record"
_PROBE = f"{string.printable} äßéñ 漢字 the of and"
"""A text whose ids tell tokenizers apart."""


def cached_records(
    source: RecordSource,
    tokenizer: Any,  # noqa: ANN401 - whatever the tokenizer is
    options: EncodeOptions,
    *,
    skips: bool,
) -> index.Index:
    """Open the cache of what records become, tokenising them first where there is none.

    Its facts are `format`, `columns` by role, `kinds` of the fields, `counts` of records by part
    (the one that is trained on is the first), `other_parts` and columns that are `unread`, `runs`
    of rows that were kept, `dropped` by reason, `overlong`, `num_classes`, `label_names`, and
    options that are `unused`, each with why; of `pairs` what was found, and the `pair_rule`;
    how many records each part has, `num_records`; and without labels `left_out`, by part the rows
    that are no samples, each with why.
    """
    # What a name on the hub stands for is known once it is loaded.
    loaded, state = None, source.digest
    if source.kind == "hub":
        loaded = source.load(cache_folder())
        state = str(sorted(str(part._fingerprint) for part in loaded[0].values()))

    def build(add: index.Add) -> tuple[list[str], dict[str, Any]]:
        with TemporaryDirectory(dir=cache_folder(), prefix=".records-") as scratch:
            parts, others = loaded or source.load(Path(scratch))
            num_records = {part: len(records) for part, records in parts.items()}
            # By part, the numbers of the records that are read
            rows: dict[str, IntArray] = {part: np.arange(n) for part, n in num_records.items()}
            if options.filter_by:
                rows = selected_rows(source, parts, options.filter_by)
                parts = {part: parts[part].select(own) for part, own in rows.items()}
            trained = dict(islice(parts.items(), 1))
            first = [*islice(records_of_parts(source, trained), _LOOKED_AT)]
            form = _recognised(source, trained, first, options)
            encode_record, facts = fields_of(source, parts, form, tokenizer, options)
            some = facts.pop("rows", None)
            encoder = encode.RecordEncoder(
                format=form,
                is_json=source.kind == "json",
                tokenizer=tokenizer,
                max_length=options.max_length,
                overlong=options.overlong or OVERLONG.get(form.name, "cut"),
                fields_of=encode_record,
                options=options.of_answers,
                group_of=GROUP_OF.get(form.name) if options.learns else None,
                weighs=weighs_samples(source, parts, form, options),
            )
            ignored = chat_encoder.unread_by_template(encoder, first)
            written = _Writer(source, encoder, add, skips=skips, notes=not options.learns)
            counts = dict[str, int]()
            for part, records in parts.items():
                own = range(len(records)) if some is None else some[part]
                taken = _at_most(options.max_samples, own)
                counts[part] = written.add_part(part, records.select(taken), rows[part][taken])
        written.check(sum(counts.values()))
        facts |= {
            "format": form.name,
            "columns": form.columns,
            "kinds": written.kinds,
            "runs": written.runs,
            "counts": counts,
            "other_parts": others,
            "dropped": dict(written.dropped),
            "divided": [written.num_divided, written.num_answers],
            "overlong": encoder.overlong,
            "unread": [name for name in (*form.unread, *ignored) if name not in options.filter_by],
            "kept": options.filter_by and [sum(map(len, rows.values())), sum(num_records.values())],
            "unused": chat_encoder.unused_options(encoder, first),
            "num_records": num_records,
            "left_out": {} if options.learns else written.left_out,
        }
        return written.bad, facts

    chosen = f"{source.path}|{source.subset}|{source.part}|{source.one_part_only}"
    settings = f"{chosen}|{options}|{skips}|{_digest(tokenizer)}"
    # The number goes up where the same records become other entries.
    return index.cached_index("hf", settings, {}, build, reader=f"9|{state}")


def _recognised(
    source: RecordSource, trained: Mapping[str, Any], first: Sequence[Any], options: EncodeOptions
) -> Format:
    """Find the format of the records by the columns of those that are trained on."""
    ((part, records),) = trained.items()
    place = f"data.path={source.path}"
    if not first:
        raise DataError(f"{place}: holds no records")
    columns = [name for name in records.column_names if name != FAULT_COLUMN]
    if source.kind == "json":
        # Names in any of these records, those of the first one first
        found = [each for each in first if isinstance(each, dict)]
        columns = [*dict.fromkeys(chain.from_iterable(found))]
        if not found:
            name = source.name_of(part, 0)
            raise DataError(f"data: {name}: not a JSON object, and none is in the records after it")
    filtered = options.filter_by
    if options.trained_format is not None:
        return as_trained(place, columns, options.trained_format, options.columns, filtered)
    typed, how = options.columns, {"learns": options.learns, "of_pairs": options.of_pairs}
    return recognise(place, columns, options.task, typed, filtered, **how)


def _at_most(most: int | None, rows: Sequence[int]) -> IntArray:
    """Choose at most so many numbers of records, at even distances."""
    found = np.array(rows, dtype=np.int64)
    if most is None or most >= len(found):
        return found
    return found[np.linspace(0, len(found) - 1, most, dtype=np.int64)]


@final
@dataclass
class _Writer:
    """Encodes the parts of a source one after the other into an index."""

    source: RecordSource
    encoder: encode.RecordEncoder
    add: index.Add
    _: KW_ONLY
    skips: bool
    notes: bool  # whether each record that is no sample is noted, and the rest goes on
    left_out: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    bad: list[str] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    kinds: Mapping[str, SampleKind] = field(default_factory=dict)
    # Records that became a sample for each answer, and how many samples these are
    num_divided: int = 0
    num_answers: int = 0
    # By part, the first row and the number of records that were kept one after the other
    runs: dict[str, list[list[int]]] = field(default_factory=dict)

    def add_part(self, part: str, records: Any, rows: IntArray) -> int:  # noqa: ANN401 - a Dataset
        """Add records, which are some rows of a part, and count their samples."""
        runs = self.runs.setdefault(part, [])
        count, label = 0, f"tokenising {Path(self.source.path).name}"
        encoded = closing(self.encoder.run(records))
        with progress(label, len(records), "record") as advance, encoded as found:
            for row, samples in zip(rows.tolist(), found, strict=True):
                advance()
                self.num_divided += len(samples) > 1
                self.num_answers += len(samples) * (len(samples) > 1)
                for sample in samples:
                    if isinstance(sample, ValueError):
                        self._leave_out(part, row, sample)
                        continue
                    self.kinds = self.kinds or sample.kinds
                    if sample.kinds != self.kinds:
                        self._leave_out(part, row, ValueError(_OTHER_FIELDS))
                        continue
                    self.add(sample.entry, sample.group)
                    count += 1
                    # A record of several samples is a run for each of them.
                    if not runs or sum(runs[-1]) != row:
                        runs.append([row, 0])
                    runs[-1][1] += 1
        return count

    def _leave_out(self, part: str, row: int, error: ValueError) -> None:
        """Note a record that is no sample; one that is bad is a DataError."""
        before, why = fault(error)
        if self.notes or isinstance(error, encode.DroppedError):
            self.dropped[why] += 1
            self.left_out.setdefault(part, []).append((row, why))
            return
        # A name is found by reading the file up to there.
        name = "data"
        if len(self.bad) < index.LISTED_SKIPS:
            name = self.source.name_of(part, row, before)
        self.bad.append(f"{name}: {why}")
        if not self.skips:
            text = f"data: {self.bad[0]}; fix it, or use data.on_bad=skip"
            raise DataError(text) from error

    def check(self, count: int) -> None:
        """Refuse a source of which too much is bad, or nothing is kept."""
        total = count + len(self.bad) + sum(self.dropped.values())
        index.refuse_many(self.bad, total)
        if count == 0:
            why = ", ".join(f"{n} {reason}" for reason, n in self.dropped.items())
            raise DataError(f"data.path={self.source.path}: no record is left ({why or 'none'})")


def vocabulary_digest(tokenizer: Any) -> str | None:  # noqa: ANN401 - whatever the tokenizer is
    """Tell the words of a tokenizer from those of others, wherever its files are; None without."""
    if not hasattr(tokenizer, "get_vocab"):
        return None
    words = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.blake2b(words.encode(), digest_size=8).hexdigest()


def _digest(tokenizer: Any) -> str:  # noqa: ANN401 - whatever the tokenizer is
    """Tell a tokenizer from others by the ids that it gives and the files that it saves, if any.

    How it last cut and padded is written there too, and is no part of it.
    """
    digest = hashlib.sha256(type(tokenizer).__qualname__.encode())
    # A tokenizer of a user's own may know none of these characters.
    with suppress(Exception):
        digest.update(str(tokenizer([_PROBE])[INPUT_IDS]).encode())
    with TemporaryDirectory() as folder:
        if hasattr(tokenizer, "save_pretrained"):
            tokenizer.save_pretrained(folder)
        for file in sorted(Path(folder).rglob("*")):
            if file.is_file():
                content = file.read_bytes()
                if file.name == "tokenizer.json":
                    same = {**json.loads(content), "truncation": None, "padding": None}
                    content = json.dumps(same).encode()
                digest.update(file.name.encode() + content)
    return digest.hexdigest()
