"""Tokenise records once, into a cache that is opened ever after."""

from __future__ import annotations

import hashlib
import json
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, final

import numpy as np

from trainer.core.errors import DataError
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
from trainer.features.hugging_face.filter import selected_rows, values_by_column
from trainer.features.hugging_face.formats import Format, as_trained, recognise
from trainer.features.hugging_face.records import RecordSource
from trainer.plan.cut import IntArray

_LOOKED_AT = 100
"""Records of JSON whose names are looked at to recognise the format."""
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
    without labels also how many records each part has, `num_records`, and `left_out`, by part the
    rows that are no samples, each with why.
    """
    # What a name on the hub stands for is known once it is loaded.
    loaded, state = None, source.digest
    if source.kind == "hub":
        loaded = source.load(index.cache_folder())
        state = str(sorted(str(part._fingerprint) for part in loaded[0].values()))

    def build(add: index.Add) -> tuple[list[str], dict[str, Any]]:
        with TemporaryDirectory(dir=index.cache_folder(), prefix=".records-") as scratch:
            parts, others = loaded or source.load(Path(scratch))
            selected = dict[str, Any]()
            num_records = {part: len(records) for part, records in parts.items()}
            if options.filter_by:
                is_json, place = source.kind == "json", f"data.path={source.path}"
                values = values_by_column(options.filter_by)
                selected = selected_rows(place, parts, values, is_json=is_json)
                parts = {part: parts[part].select(own) for part, own in selected.items()}
            form = _recognised(source, parts, options)
            first = [*islice(records_of_parts(source, parts), _LOOKED_AT)]
            ignored = chat_encoder.unread_by_template(form, first, tokenizer, options.of_answers)
            encode_record, facts = fields_of(source, parts, form, tokenizer, options)
            rows = facts.pop("rows", None)
            encoder = encode.RecordEncoder(
                format=form,
                is_json=source.kind == "json",
                tokenizer=tokenizer,
                max_length=options.max_length,
                overlong=options.overlong or OVERLONG.get(form.name, "cut"),
                fields_of=encode_record,
                group_of=GROUP_OF.get(form.name) if options.learns else None,
                weighs=weighs_samples(source, parts, form, options),
            )
            written = _Writer(source, encoder, add, skips=skips, notes=not options.learns)
            written.rows = selected
            counts = dict[str, int]()
            for part, records in parts.items():
                some = rows[part] if rows is not None else None
                counts[part] = written.add_part(part, records, options.max_samples, some)
        written.check(sum(counts.values()))
        facts |= {"format": form.name, "columns": form.columns, "kinds": written.kinds}
        facts |= {
            "runs": written.runs,
            "counts": counts,
            "other_parts": others,
            "dropped": dict(written.dropped),
            "divided": [written.num_divided, written.num_answers],
            "overlong": encoder.overlong,
            "unread": [name for name in (*form.unread, *ignored) if name not in options.filter_by],
            "kept": selected and [sum(map(len, selected.values())), sum(num_records.values())],
            "unused": _unused(options, encoder, first),
        }
        if not options.learns:
            facts["num_records"] = num_records
            facts["left_out"] = written.left_out
        return written.bad, facts

    chosen = f"{source.path}|{source.subset}|{source.part}|{source.one_part_only}"
    settings = f"{chosen}|{options}|{skips}|{_digest(tokenizer)}"
    # The number goes up where the same records become other entries.
    return index.cached_index("hf", settings, {}, build, reader=f"9|{state}")


def _recognised(source: RecordSource, parts: Mapping[str, Any], options: EncodeOptions) -> Format:
    """Find the format of the records by the columns of those that are trained on."""
    records, place = next(iter(parts.values())), f"data.path={source.path}"
    if not len(records):
        raise DataError(f"{place}: holds no records")
    columns = [name for name in records.column_names if name != FAULT_COLUMN]
    if source.kind == "json":
        first = encode.records_of(records[:_LOOKED_AT], is_json=True)
        found = [each for each in first if isinstance(each, dict)]
        # Names in any of these records, those of the first one first
        names = dict[str, None]()
        for record in found:
            names |= dict.fromkeys(record)
        columns = [*names]
        if not found:
            name = source.name_of(next(iter(parts)), 0)
            raise DataError(f"data: {name}: not a JSON object, and none is in the records after it")
    filtered = options.filter_by
    if options.trained_format is not None:
        return as_trained(place, columns, options.trained_format, options.columns, filtered)
    typed, how = options.columns, {"learns": options.learns, "of_pairs": options.of_pairs}
    return recognise(place, columns, options.task, typed, filtered, **how)


def _unused(
    options: EncodeOptions, encoder: encode.RecordEncoder, first: Sequence[Any]
) -> dict[str, str]:
    """Say of options that were typed and do nothing what they are for, by the first records."""
    used = chat_encoder.answer_options(encoder, options.of_answers, first)
    these = f"and these records are {encoder.format.name} under data.overlong={encoder.overlong}"
    unused = dict[str, str]()
    for name, (default, purpose) in encode.OF_ANSWERS.items():
        if options.of_answers[name] != default and name not in used:
            unused[name] = f"{purpose}, {these}"
    return unused


def _chosen(num_records: int, most: int | None, some: Sequence[int] | None) -> IntArray:
    """Choose at most so many records, of all or some, at even distances; gives their numbers."""
    rows = np.arange(num_records) if some is None else np.asarray(some, dtype=np.int64)
    if most is None or most >= len(rows):
        return rows
    return rows[np.linspace(0, len(rows) - 1, most, dtype=np.int64)]


@final
class _Writer:
    """Encodes the parts of a source one after the other into an index."""

    def __init__(
        self,
        source: RecordSource,
        encoder: encode.RecordEncoder,
        add: index.Add,
        *,
        skips: bool,
        notes: bool,
    ) -> None:
        self._source, self._encoder, self._add, self._skips = source, encoder, add, skips
        # Whether it notes each record that is no sample, and goes on
        self._notes, self.left_out = notes, dict[str, list[tuple[int, str]]]()
        self.bad, self.dropped = list[str](), Counter[str]()
        # By part, which rows of the files the records are, where not all of them are read
        self.rows: Mapping[str, Any] = {}
        self.kinds: Mapping[str, SampleKind] = {}
        # Records that became a sample for each answer, and how many samples these are
        self.num_divided = self.num_answers = 0
        # By part, the first row and the number of records that were kept one after the other
        self.runs: dict[str, list[list[int]]] = {}

    def add_part(
        self,
        part: str,
        records: Any,  # noqa: ANN401 - a Dataset
        most: int | None,
        some: Sequence[int] | None = None,
    ) -> int:
        """Add the records of a part, and count those that are kept; a bad one is a DataError.

        Of some rows alone, where others are read with them.
        """
        rows = _chosen(len(records), most, some)
        places = self.rows.get(part, np.arange(len(records)))
        if len(rows) < len(records):
            records = records.select(rows)
        rows = places[rows]
        runs = self.runs.setdefault(part, [])
        count, label = 0, f"tokenising {Path(self._source.path).name}"
        encoded = closing(self._encoder.run(records))
        with progress(label, len(records), "record") as advance, encoded as found:
            for row, each in zip(rows, found, strict=True):
                advance()
                if isinstance(each, list):
                    self.num_divided += len(each) > 1
                    self.num_answers += len(each) * (len(each) > 1)
                    for sample in each:
                        if isinstance(sample, encode.DroppedError):
                            self.dropped[str(sample)] += 1
                            continue
                        self.kinds = self.kinds or sample.kinds
                        self._add(sample.entry, sample.group)
                        count += 1
                        # A record of several samples is a run for each of them.
                        if not runs or sum(runs[-1]) != row:
                            runs.append([int(row), 0])
                        runs[-1][1] += 1
                elif self._notes or isinstance(each, encode.DroppedError):
                    self.dropped[str(each)] += 1
                    self.left_out.setdefault(part, []).append((int(row), fault(each)[1]))
                else:
                    # A name is found by reading the file up to there.
                    before, why = fault(each)
                    name = "data"
                    if len(self.bad) < index.LISTED_SKIPS:
                        name = self._source.name_of(part, int(row), before)
                    self.bad.append(f"{name}: {why}")
                    if not self._skips:
                        text = f"data: {self.bad[0]}; fix it, or use data.on_bad=skip"
                        raise DataError(text) from each
        return count

    def check(self, count: int) -> None:
        """Refuse a source of which too much is bad, or nothing is kept."""
        total = count + len(self.bad) + sum(self.dropped.values())
        index.refuse_many(self.bad, total)
        if count == 0:
            why = ", ".join(f"{n} {reason}" for reason, n in self.dropped.items())
            raise DataError(f"data.path={self._source.path}: no record is left ({why or 'none'})")


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
