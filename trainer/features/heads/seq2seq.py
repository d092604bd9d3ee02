"""Predict the tokens of a second sequence from a first: translation, summaries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.core.errors import ConfigError
from trainer.core.micro_batch import IGNORED, Fields, output_part
from trainer.data.collate import LABELS
from trainer.objectives.base import ModelCall, logits_of
from trainer.objectives.next_token import TokenEntropy, sequences_of
from trainer.objectives.text_output import TextOutput, continued

DECODER_IDS = "decoder_input_ids"


@dataclass(frozen=True, kw_only=True)
class Seq2Seq(TokenEntropy):
    """Cross entropy of the labels, which have lengths of their own and are not shifted.

    What the decoder reads are the labels moved by one: by the model's own method
    `prepare_decoder_input_ids_from_labels`, or behind the start token of its config. Data may bring
    `decoder_input_ids`.
    """

    writes_labels = True

    def targets(self, fields: Fields) -> Tensor:
        """See the base class."""
        return sequences_of(fields).long()

    def inputs(self, model: ModelCall, fields: Fields) -> Fields:
        """Add what the decoder reads.

        Raises:
            ConfigError: the model does not say what a sequence starts with.
        """
        given = super().inputs(model, fields)
        if DECODER_IDS in given:
            return given
        module, labels = getattr(model, "module", None), self.targets(fields)
        if prepare := getattr(module, "prepare_decoder_input_ids_from_labels", None):
            return {**given, DECODER_IDS: prepare(labels=labels)}
        config = getattr(module, "config", None)
        start = getattr(config, "decoder_start_token_id", None)
        pad = getattr(config, "pad_token_id", None)
        if start is None or pad is None:
            raise ConfigError(
                f"objective=seq2seq: {type(module).__name__} has no config.decoder_start_token_id "
                f"and pad_token_id: set them, or let the data give {DECODER_IDS}"
            )
        # -100 is no token: padding stands for it, as in the own method of such models.
        moved = F.pad(labels[:, :-1], (1, 0), value=start)
        return {**given, DECODER_IDS: moved.masked_fill(moved == IGNORED, pad)}

    def predict(
        self, model: ModelCall, fields: Fields, text: TextOutput
    ) -> Sequence[Mapping[str, Any]]:
        """Write the second sequence of each sample; the first is encoded once, where that can be.

        Raises:
            ConfigError: the model does not say what a sequence starts with.
        """
        first = next(iter(fields.values()))
        none = torch.full((len(first), 1), IGNORED, device=first.device)
        given: dict[str, Any] = {**self.inputs(model, {**fields, LABELS: none})}

        def next_logits(ids: Tensor) -> Tensor:
            output = model({**given, DECODER_IDS: ids})
            if (encoded := output_part(output, "encoder_last_hidden_state")) is not None:
                given["encoder_outputs"] = (encoded,)
            return logits_of(output)

        written = continued(next_logits, given[DECODER_IDS][:, :1], text)
        return [{"prediction": text.text_behind((), tokens)} for tokens in written]
