"""Read images with a text about each, as vision-language models take them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from trainer.config.components import Count, ExistingPath, Pair
from trainer.core.errors import DataError
from trainer.core.format import expanded
from trainer.core.micro_batch import IGNORED
from trainer.core.rows import Row, RunFacts, row
from trainer.data.chat import TokenCounts, encode_prompt, encode_samples
from trainer.data.conversation import ASSISTANT, normalize_messages
from trainer.data.lines import fault, json_object, json_records_of, record_place
from trainer.features.vision.pixels import open_image, processor_pixels

IMAGE = "<image>"
"""What stands for the image in a text, and the token of which one stands for each of its parts."""

_Record = tuple[npt.NDArray[np.uint8] | Path, dict[str, Any], str]
"""An image, its text, and what a message calls them."""

_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@final
class ImageText(Dataset[dict[str, Tensor]]):
    """Images, each with a prompt and the completion that is learned.

    A record of JSON lines has `image`, a file beside it, and `prompt` and `completion`, or
    `conversations` or `messages`, where `<image>` says where it stands; else it stands first. The
    tokenizer is given a token `<image>` where it has none. `pixel_values` are `(3, size, size)`,
    from -1 to 1 unless a processor says otherwise; `labels` are -100 but for the completion.

    Args:
        tokenizer: of Hugging Face.
        path: JSON lines; None is scikit-learn's 1,797 digits, with a sentence about each.
        image_size: pixels of a side, which images are scaled to without a processor.
        patch_size: of the vision encoder.
        image_tokens: tokens of an image; None is one for each patch.
        processor: folder of a model's `preprocessor_config.json`, which then makes the pixels; None
            is that of the model, if it has one.
        model_path: what the model is loaded from or configured by.
        max_length: most tokens of a sample, those of its image counted.
        learns: without it a record needs no completion, and its last answer is not read.

    Raises:
        DataError: a record lacks something, or is longer; names file and line.
    """

    draws_randomness = False
    special_tokens = (IMAGE,)

    def __init__(  # noqa: PLR0913, PLR0917 - the keys of `data`
        self,
        tokenizer: Any,  # noqa: ANN401 - of an untyped library
        path: ExistingPath | None = None,
        image_size: Count = 16,
        patch_size: Count = 4,
        image_tokens: Count | None = None,
        processor: ExistingPath | None = None,
        model_path: str | None = None,
        max_length: Pair = 256,
        learns: bool = True,
    ) -> None:
        self._tokenizer, self._learns = tokenizer, learns
        self.answer_ends = list[int]()
        if tokenizer.eos_token_id is not None:
            self.answer_ends.append(tokenizer.eos_token_id)
        self.vocab_size = len(self._tokenizer)
        self._size = image_size
        self._placeholder = IMAGE * (image_tokens or (image_size // patch_size) ** 2)
        self._processor = processor_pixels(processor, model_path)
        self._samples = list[tuple[Tensor, Tensor | None, npt.NDArray[np.uint8] | Path]]()
        self._places = list[str]()
        records = _digits() if path is None else _records(expanded(path))
        for image, text, place in records:
            try:
                self._samples.append((*self._encoded(text, max_length), image))
            except ValueError as error:
                raise DataError(f"data: {place}: {error}") from error
            self._places.append(place.rpartition("/")[2])
        self.lengths = np.array([len(ids) for ids, _, _ in self._samples])

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        """Give `input_ids` and `labels`, `(length,)` int64, and `pixel_values`, float32."""
        ids, is_term, image = self._samples[i]
        fields = {"input_ids": ids}
        if is_term is not None:
            fields["labels"] = torch.where(is_term, ids, IGNORED)
        return {**fields, "pixel_values": self._pixels(image)}

    def decode(self, ids: list[int]) -> str:
        """Write tokens as text."""
        return str(self._tokenizer.decode(ids))

    def decode_answer(self, ids: list[int]) -> str:
        """Write tokens as text, without special ones."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def name_of(self, i: int) -> str:
        """Name a sample by the place of its record."""
        return self._places[i]

    def describe_records(self, facts: RunFacts) -> Sequence[Row]:
        """Say what becomes of an image."""
        if self._processor is not None:
            return [row("", self._processor.describe())]
        return [row("", f"{self._size} x {self._size} pixels, from -1 to 1")]

    def _encoded(self, text: dict[str, Any], max_length: int) -> tuple[Tensor, Tensor | None]:
        """Encode the text of a record, and say what is learned; a ValueError says what is bad."""
        counts, is_term = list[float](), None
        if "prompt" in text and not self._learns:
            (prompt,) = self._placed([text["prompt"]], at=0)
            ids = encode_prompt(self._tokenizer, prompt)
        elif "prompt" in text and "completion" in text:
            (prompt,) = self._placed([text["prompt"]], at=0)
            ids, counts = self._one(prompt, text["completion"])
        elif turns := text.get("messages") or text.get("conversations"):
            messages = normalize_messages(turns)
            roles = [message["role"] for message in messages]
            at = roles.index("user") if "user" in roles else 0
            contents = self._placed([message["content"] for message in messages], at)
            for message, content in zip(messages, contents, strict=True):
                message["content"] = content
            if self._learns:
                ids, counts = self._one((), messages)
            else:
                while messages and messages[-1]["role"] == ASSISTANT:
                    messages.pop()
                ids = encode_prompt(self._tokenizer, messages)
        else:
            raise ValueError("neither prompt and completion nor messages; write one of them")
        # An answer needs room for a token.
        least = len(ids) + (not self._learns)
        if least > max_length:
            raise ValueError(f"{len(ids)} tokens; type data.max_length={least}")
        if {*counts} - {0, 1}:
            raise ValueError("a message beside an image has a weight; write 0 or 1")
        if counts:
            is_term = torch.tensor(counts).bool()
        return torch.tensor(ids), is_term

    def _one(self, prompt: Any, completion: Any) -> TokenCounts:  # noqa: ANN401
        """Encode a prompt and its completion as one sample, with one image."""
        found = encode_samples(self._tokenizer, prompt, completion)
        if len(found) > 1:
            raise ValueError(
                "the chat template renders earlier turns otherwise once more follow; make a record "
                "of each answer, whose `prompt` is all that precedes it"
            )
        return found[0]

    def _placed(self, texts: list[Any], at: int) -> list[str]:
        """Put the tokens of the image where it stands in texts; else before the one at `at`."""
        marks = 0
        for text in texts:
            if not isinstance(text, str):
                raise ValueError(f"a text is of type {type(text).__name__}, not a string")
            marks += text.count(IMAGE)
        if marks > 1:
            raise ValueError(f"{marks} {IMAGE} for one image; leave one")
        if not marks:
            texts = [*texts]
            texts[at] = IMAGE + texts[at]
        return [text.replace(IMAGE, self._placeholder) for text in texts]

    def _pixels(self, image: npt.NDArray[np.uint8] | Path) -> Tensor:
        from PIL import Image  # noqa: PLC0415 - for images alone

        if isinstance(image, Path):
            rgb = open_image(image)
        else:
            rgb = Image.fromarray(image).convert("RGB")
        if self._processor is not None:
            return self._processor(rgb)
        # 0 to 255 becomes -1 to 1.
        scaled = np.asarray(rgb.resize((self._size, self._size)), dtype=np.float32)
        return torch.from_numpy(scaled / 127.5 - 1).permute(2, 0, 1).contiguous()


def _digits() -> Iterator[_Record]:
    from sklearn.datasets import load_digits  # type: ignore[import-untyped] # noqa: PLC0415 - for this data alone

    digits = load_digits()
    for i, (image, digit) in enumerate(zip(digits.images, digits.target, strict=True)):
        text = {"prompt": "This is the digit", "completion": f" {_DIGITS[digit]}"}
        # scikit-learn's are of 0 to 16: by 15.9 the largest becomes 254.
        yield (image * 15.9).astype(np.uint8), text, f"digit {i}"


def _records(path: Path) -> Iterator[_Record]:
    number = 0
    for number, line in json_records_of(path):
        place = record_place(path, number)
        try:
            record = json_object(line)
            image = path.parent / record["image"]
        except UnicodeDecodeError as error:
            raise DataError(f"data: {place}: {fault(error)[1]}; fix it") from error
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"data: {place}: no JSON object with an `image`; fix it") from error
        if not image.is_file():
            raise DataError(f"data: {place}: no such image: {image}; fix it")
        yield image, record, place
    if not number:
        raise DataError(f"data.path={path}: holds no records")
