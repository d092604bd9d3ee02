"""Models with other heads than those for the next token, as small as they can be, with data."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tests.lib.run_toys import VOCABULARY, DoubleNet, Rows

NUM_LABELS = 3


class Tokens(SimpleNamespace):
    """A tokenizer, of which only the names of its special tokens matter."""

    def __init__(self) -> None:
        super().__init__(mask_token_id=3, pad_token_id=0, all_special_ids=[0, 1, 3])

    def __len__(self) -> int:
        return VOCABULARY


class Translator(DoubleNet):
    """Predicts the labels from those before them and the mean of the input."""

    task = "seq2seq_lm"

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(decoder_start_token_id=1, pad_token_id=0)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor) -> Any:
        mask = attention_mask[..., None]
        mean = (self.embed(input_ids) * mask).sum(1) / mask.sum(1)
        return self.head(self.norm(self.embed(decoder_input_ids) + mean[:, None]))


class Translations(Rows):
    """Labels of lengths of their own."""

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        labels = self.tokens[(index + 1) % len(self)]
        return {"input_ids": self.tokens[index], "labels": labels}


class Finder(DoubleNet):
    """Finds the two ends of an answer."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = nn.Linear(VOCABULARY, 2, bias=False).double()  # no softmax sees one

    def forward(self, input_ids: Tensor) -> Any:
        start, end = self.ends(super().forward(input_ids).tanh()).unbind(-1)
        return SimpleNamespace(start_logits=start, end_logits=end)


class Answers(Rows):
    """Answers, of which every seventh is nowhere."""

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        first, last = index % 2, len(self.tokens[index]) - 1
        ends = {"start_positions": first, "end_positions": last}
        if index in self.unlabelled:
            ends = dict.fromkeys(ends, -100)
        return {"input_ids": self.tokens[index], **ends}


class Scorer(DoubleNet):
    """Gives numbers for a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = nn.Linear(8, NUM_LABELS).double()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        tokens, mask = self.embed(input_ids), attention_mask[..., None]
        return self.numbers(torch.tanh((tokens * mask).sum(1)))


class Scores(Rows):
    """Numbers from 0 to 1, of which some are not known."""

    def __init__(self, whole: bool = False) -> None:
        super().__init__()
        self.whole = whole

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        draws = torch.rand(NUM_LABELS, generator=torch.Generator().manual_seed(index)).double()
        labels = draws.round() if self.whole else draws
        labels[1 : 1 + (index % 7 == 0)] = -100.0
        return {"input_ids": self.tokens[index], "labels": labels}
