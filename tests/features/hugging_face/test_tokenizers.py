"""Tokenizers: bytes, those of a folder, and what has none."""

import json

import pytest

from tests.lib.hf_toys import save_tokenizer
from trainer.core.errors import ConfigError
from trainer.features.hugging_face.tokenizers import hugging_face_tokenizer, tokenizer_of_model

TEXT = "naïve  café\n\t\x00 z 🎉"


def test_ids_of_bytes_are_the_bytes_between_begin_and_end():
    tokenizer = tokenizer_of_model()
    assert len(tokenizer) == 258
    assert tokenizer(TEXT, add_special_tokens=False)["input_ids"] == [*TEXT.encode()]
    assert tokenizer(TEXT)["input_ids"] == [256, *TEXT.encode(), 257]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (256, 257)
    assert tokenizer.decode([*TEXT.encode()]) == TEXT


def test_a_model_gives_its_tokenizer_and_one_without_bytes(tmp_path):
    own, none = (str(tmp_path / name) for name in ("own", "none"))
    size = len(save_tokenizer(tmp_path / "own"))
    (tmp_path / "own/config.json").write_text("{}")
    (tmp_path / "none").mkdir()
    assert len(tokenizer_of_model(model=own)) == size
    assert len(tokenizer_of_model(model=f"{own}/config.json")) == size
    assert len(hugging_face_tokenizer(model=own)) == size
    assert len(tokenizer_of_model(model=none)) == 258
    # Weights of as many ids as bytes have were trained on bytes.
    (tmp_path / "none/model.safetensors").touch()
    (tmp_path / "none/config.json").write_text('{"vocab_size": 258}')
    assert len(tokenizer_of_model(model=none)) == 258
    (tmp_path / "none/config.json").write_text('{"vocab_size": 300}')
    with pytest.raises(ConfigError, match="for a tokenizer of 300 ids, and none is there: type"):
        tokenizer_of_model(model=none)
    # A path that was typed comes before the model's.
    assert len(tokenizer_of_model(own, model=none)) == size


def test_what_is_no_tokenizer_or_needs_code_of_its_folder_is_one_line(tmp_path):
    (tmp_path / "none").mkdir()
    with pytest.raises(ConfigError, match=r"tokenizer.path: type the folder of a tokenizer"):
        hugging_face_tokenizer()
    with pytest.raises(ConfigError, match=r"tokenizer.path=.*none: no tokenizer there"):
        tokenizer_of_model(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"^model: gone: no such file or folder"):
        tokenizer_of_model(model="gone")
    with pytest.raises(ConfigError, match=r"gone: no such .*, and no tokenizer of this name"):
        hugging_face_tokenizer(str(tmp_path / "gone"))
    save_tokenizer(tmp_path)
    (tmp_path / "mine.py").write_text("raise SystemExit('run')")
    file = tmp_path / "tokenizer_config.json"
    code = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": [None, "mine.Mine"]}}
    file.write_text(json.dumps(json.loads(file.read_text()) | code))
    with pytest.raises(ConfigError, match="needs code from its own folder, which is not run"):
        hugging_face_tokenizer(str(tmp_path))
