"""Samples that the classes of transformers train on: ragged tokens and sounds, and images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor

VOCABULARY, NUM_LABELS, NUM_CHOICES, IMAGE = 64, 3, 3, 64
FIRST_WORD = 20  # ids below are special


@final
class Samples:
    """Ragged samples of random tokens, sounds or images, with the labels that a kind of head takes.

    Args:
        kind: one of `KINDS`.
        folder: of the model's config.
    """

    draws_randomness = False

    def __init__(self, kind: str, folder: str) -> None:
        import transformers  # noqa: PLC0415 - seconds

        self.kind, self.num_labels = kind, NUM_LABELS
        config = transformers.AutoConfig.from_pretrained(folder)
        self.name = (config.architectures or [""])[0]
        self.config = config
        self.lengths = np.random.default_rng(3).integers(4, 15, size=24).astype(np.int64)
        if kind in ("image_classification", "audio_classification"):
            self.lengths = np.ones(24, dtype=np.int64)
        if kind == "multiple_choice":  # the default collation pads one dimension, and it has two
            self.lengths = np.full(24, 6, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        """Give one sample, always the same."""
        make = torch.Generator().manual_seed(index)
        label = torch.randint(0, NUM_LABELS, (), generator=make)
        if self.kind == "image_classification":
            return {"pixel_values": self._image(make), "labels": label}
        if self.kind == "audio_classification":
            return {**self._sound(make), "labels": label}

        return self._words(int(self.lengths[index]), label, make)

    def _words(self, length: int, label: Tensor, make: torch.Generator) -> Mapping[str, Tensor]:
        """Give tokens, and the labels of the kind; some of a sequence's are no loss terms."""

        def words(*size: int) -> Tensor:
            return torch.randint(FIRST_WORD, VOCABULARY, size, generator=make)

        tokens, hidden = words(length), torch.rand(length, generator=make) < 0.3
        hidden[-1] = False
        if self.kind == "multiple_choice":
            return {"input_ids": words(NUM_CHOICES, length), "labels": label}
        if self.kind == "question_answering":
            ends = torch.randint(0, length, (2,), generator=make)
            return {"input_ids": tokens, "start_positions": ends[0], "end_positions": ends[1]}
        tags = torch.randint(0, NUM_LABELS, (length,), generator=make)
        labels = {
            "sequence_classification": label,
            "token_classification": tags.masked_fill(hidden, -100),
            "masked_lm": words(length).masked_fill(~hidden, -100),
            "seq2seq_lm": words(3 + length % 5),
        }
        return {
            "input_ids": tokens,
            "labels": labels.get(self.kind, tokens.masked_fill(hidden, -100)),
        }

    def _image(self, make: torch.Generator) -> Tensor:
        size = getattr(self.config, "image_size", IMAGE)
        size = size if isinstance(size, int) else IMAGE
        return torch.randn(getattr(self.config, "num_channels", 3), size, size, generator=make)

    def _sound(self, make: torch.Generator) -> Mapping[str, Tensor]:
        if self.name.startswith(("Whisper", "AST")):
            bins = self.config.num_mel_bins
            frames = 2 * getattr(self.config, "max_source_positions", 0) or self.config.max_length
            shape = (bins, frames) if self.name.startswith("Whisper") else (frames, bins)
            name = "input_features" if self.name.startswith("Whisper") else "input_values"
            return {name: torch.randn(shape, generator=make)}
        size = int(torch.randint(1600, 2400, (), generator=make))
        if self.name.startswith("Wav2Vec2Bert"):
            features = torch.randn(
                size // 50, self.config.feature_projection_input_dim, generator=make
            )
            return {"input_features": features, "attention_mask": torch.ones(size // 50).long()}
        sound = {"input_values": torch.randn(size, generator=make)}
        return {**sound, "attention_mask": torch.ones(size, dtype=torch.int64)}


def together(
    samples: Sequence[Mapping[str, Tensor]], like: Sequence[Mapping[str, Tensor]] = ()
) -> dict[str, Tensor]:
    """Stack samples, padded on the right with 0, labels with -100.

    Args:
        samples: one or more.
        like: whose longest each field is padded to; the samples themselves unless given.
    """
    fields: dict[str, Tensor] = {}
    for name in samples[0]:
        column = [sample[name] for sample in samples]
        if column[0].dim() > 0:
            axis = -1 if name == "input_ids" else 0
            longest = max(sample[name].shape[axis] for sample in like or samples)
            column = [_padded(c, axis, longest, -100 if name == "labels" else 0) for c in column]
        fields[name] = torch.stack(column)
    if "input_ids" in fields:
        lengths = torch.tensor([s["input_ids"].shape[-1] for s in samples])
        mask = (torch.arange(fields["input_ids"].shape[-1]) < lengths[:, None]).long()
        if fields["input_ids"].dim() > 2:
            mask = mask[:, None].repeat(1, NUM_CHOICES, 1)
        fields["attention_mask"] = mask
    return fields


def _padded(values: Tensor, axis: int, length: int, fill: int) -> Tensor:
    missing = list(values.shape)
    missing[axis] = length - values.shape[axis]
    return torch.cat([values, values.new_full(missing, fill)], axis)
