"""Build tokenizers of transformers: from the files of a model, or of bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer.config.components import ExistingPath, Words
from trainer.config.messages import did_you_mean_file
from trainer.core.durable import read_json
from trainer.core.errors import ConfigError
from trainer.core.format import expanded, shown_path
from trainer.core.hub_cache import model_folder, read_cache_without_network
from trainer.data.documents import Ends
from trainer.data.samples import INPUT_IDS
from trainer.features.hugging_face.added_tokens import with_tokens
from trainer.features.hugging_face.model_folder import not_found

_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.*", "*.model")
"""Patterns of the files of which a folder with a tokenizer has at least one."""
_NUM_BYTE_IDS = 258  # 256 and two that begin and end


def hugging_face_tokenizer(
    path: ExistingPath | None = None, model: str | None = None, add: Words | None = None
) -> Any:  # noqa: ANN401 - whatever class the files name
    """Load a tokenizer of a folder or of the hub, or else that of a model; no code there is run.

    The words of `add` become tokens of it.
    """
    source = path or model
    if source is None:
        raise ConfigError("tokenizer.path: type the folder of a tokenizer, or its name on the hub")
    place, what = f"model: {model}", "model"
    if path:
        place, what = f"tokenizer.path={path}", "tokenizer"
    name = model_folder(source)
    folder = Path(name)
    if folder.is_dir() and not _has_tokenizer(folder):
        text = "no tokenizer there: type the folder of one, or tokenizer=bytes"
        raise ConfigError(f"{place}: {text}")
    read_cache_without_network(source)
    from transformers import AutoTokenizer  # noqa: PLC0415 - seconds, and only for this option

    try:
        found = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        text = f"transformers cannot load it: {' '.join(str(error).split())}"
        if "trust_remote_code" in text:
            text = "it needs code from its own folder, which is not run; use another"
        elif not folder.is_dir():
            text = not_found(what, source)
        raise ConfigError(f"{place}: {text}") from error
    return with_tokens(found, add)


def tokenizer_of_model(
    path: ExistingPath | None = None, model: str | None = None, add: Words | None = None
) -> Any:  # noqa: ANN401 - whatever class the files name
    """Load a tokenizer as `hugging_face_tokenizer`; of a model without one, give that of bytes.

    Weights that were made for another tokenizer are refused.
    """
    if path is None and model is not None:
        folder = Path(model_folder(model))
        if folder.is_dir() and not _has_tokenizer(folder):
            _refuse_bytes(folder)
            model = None
    if path is None and model is None:
        return byte_tokenizer(add)
    return hugging_face_tokenizer(path, model, add)


def _refuse_bytes(folder: Path) -> None:
    """Refuse weights of another number of ids than bytes have, whose own tokenizer is gone."""
    size = read_json(folder / "config.json").get("vocab_size")
    if size not in {None, _NUM_BYTE_IDS} and any(folder.glob("*.safetensors")):
        raise ConfigError(
            f"model: {shown_path(folder)}: its weights are for a tokenizer of {size} ids, and none "
            "is there: type the folder of it, tokenizer.path=FOLDER, or tokenizer=bytes"
        )


def byte_tokenizer(add: Words | None = None) -> Any:  # noqa: ANN401 - of an untyped library
    """Build a tokenizer whose ids are the bytes of UTF-8, then BOS = 256 and EOS = 257."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415
    from transformers.convert_slow_tokenizer import bytes_to_unicode  # noqa: PLC0415

    # The library spells each byte as a character that can be printed.
    vocabulary = {character: byte for byte, character in bytes_to_unicode().items()}
    bos, eos = "<|bos|>", "<|eos|>"
    backend = Tokenizer(models.BPE(vocab=vocabulary | {bos: 256, eos: 257}, merges=[]))
    # Not divided into words: there are no merges, and each byte is an id by itself.
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A {eos}", pair=None, special_tokens=[(bos, 256), (eos, 257)]
    )
    found = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=bos, eos_token=eos, name_or_path="bytes"
    )
    return with_tokens(found, add)


def read_template(typed: str | None) -> str | None:
    """Read a chat template, where a file was typed in place of its text."""
    if typed is None or "{" in typed:
        return typed
    file = expanded(typed)
    if not file.is_file():
        text = f"no such file, and no template, which has {{.{did_you_mean_file(typed)}"
        raise ConfigError(f"data.chat_template={typed}: {text.removesuffix('.')}")
    return file.read_text()


def ends_of(tokenizer: Any, *, is_causal: bool) -> Ends:  # noqa: ANN401 - a tokenizer
    """Find the special tokens that a tokenizer puts around a text.

    A document that a causal model learns has an end in any case.
    """
    plain = [*tokenizer(["a"], add_special_tokens=False)[INPUT_IDS][0]]
    whole = [*tokenizer(["a"], add_special_tokens=True)[INPUT_IDS][0]]
    # It stays 0 where special tokens change how the text is written.
    at = 0
    for place in range(len(whole) - len(plain) + 1):
        if whole[place : place + len(plain)] == plain:
            at = place
            break
    prefix, suffix = whole[:at], whole[at + len(plain) :]
    eos = getattr(tokenizer, "eos_token_id", None)
    if is_causal and eos is not None and eos not in suffix:
        suffix = [*suffix, eos]
    return Ends(tuple(prefix), tuple(suffix), of_samples=not is_causal)


def pad_token_of(tokenizer: Any) -> int:  # noqa: ANN401 - a tokenizer
    """Find what to pad with, as the field does: the tokenizer's own, else its end, else 0."""
    for name in ("pad_token_id", "eos_token_id"):
        number: int | None = getattr(tokenizer, name, None)
        if number is not None:
            return number
    return 0


def _has_tokenizer(folder: Path) -> bool:
    return any(any(folder.glob(pattern)) for pattern in _FILES)
