"""Harness 12: checkpoints of every released format load bit for bit, and altered ones do not.

`golden/format-N` was written by the program that had format N; what it holds is spelled out beside
it. A newer format is told from damage, and says what to do.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.reliability import lab
from tests.reliability.make_golden import GOLDEN, SETTINGS, expected
from tests.reliability.test_hostile_checkpoints import sign
from trainer.checkpoint.manifest import FORMAT_VERSION
from trainer.checkpoint.store import CheckpointStore
from trainer.core.errors import NoCheckpointError
from trainer.data.split import fingerprint_of
from trainer.data.text import Text
from trainer.data.tokens import TokenWindows

FORMATS = sorted(GOLDEN.iterdir())


@pytest.mark.parametrize("golden", FORMATS, ids=lambda path: path.name)
def test_a_golden_checkpoint_loads_bit_for_bit(golden: Path) -> None:
    wanted = json.loads((golden / "expected.json").read_text())
    found = json.loads(json.dumps(expected(golden / "checkpoints")))
    assert found == wanted


def test_the_present_format_has_a_golden_checkpoint() -> None:
    assert (GOLDEN / f"format-{FORMAT_VERSION}").is_dir()


@pytest.mark.parametrize("golden", FORMATS, ids=lambda path: path.name)
def test_a_golden_checkpoint_is_trained_on(golden: Path, tmp_path: Path) -> None:
    shutil.copytree(golden / "checkpoints", tmp_path / "run" / "checkpoints")
    ended = lab.run(lab.config(*SETTINGS), tmp_path / "run", resume=True)
    assert ended.code == 0, ended
    assert CheckpointStore(tmp_path / "run" / "checkpoints").steps()[-1] == 3


def newer(body: dict[str, Any]) -> None:
    body["format_version"] = FORMAT_VERSION + 1


def nameless(body: dict[str, Any]) -> None:
    body["format_version"] = "one"


def another_step(body: dict[str, Any]) -> None:
    body["step"] = 3


def no_step(body: dict[str, Any]) -> None:
    del body["step"]


def no_files(body: dict[str, Any]) -> None:
    body["files"] = {}


def no_tensors(body: dict[str, Any]) -> None:
    body["tensors"] = {}


def another_shape(body: dict[str, Any]) -> None:
    body["tensors"]["model.head.bias"]["shape"] = [8, 2]


def another_dtype(body: dict[str, Any]) -> None:
    body["tensors"]["model.head.bias"]["dtype"] = "I32"


def another_file(body: dict[str, Any]) -> None:
    body["tensors"]["model.head.bias"]["file"] = "optimizer.safetensors"


def no_meta(body: dict[str, Any]) -> None:
    body["meta"] = {}


def no_cursor(body: dict[str, Any]) -> None:
    del body["meta"]["extra"]["cursor"]


def another_optimizer(body: dict[str, Any]) -> None:
    body["meta"]["optimizer"]["class"] = "SGD"


def a_list_for_a_contract(body: dict[str, Any]) -> None:
    body["meta"]["extra"]["contract"] = ["batch.global"]


def a_text_for_a_count(body: dict[str, Any]) -> None:
    body["meta"]["extra"]["tokens"] = "many"


def a_step_beyond_all(body: dict[str, Any]) -> None:
    body["meta"]["extra"]["cursor"]["step"] = 10**30


def no_cut(body: dict[str, Any]) -> None:
    body["meta"]["extra"]["cut"] = {}


def a_number_for_tuning(body: dict[str, Any]) -> None:
    body["meta"]["extra"]["cut"]["tuning"] = -1


def another_setting(body: dict[str, Any]) -> None:
    body["meta"]["optimizer"]["groups"][0]["betas"] = None


def a_position_beyond_all(body: dict[str, Any]) -> None:
    body["meta"]["rng"]["numpy"][2] = 10**30


ALTERED = [
    a_list_for_a_contract,
    a_text_for_a_count,
    a_step_beyond_all,
    no_cut,
    a_number_for_tuning,
    another_setting,
    a_position_beyond_all,
    newer,
    nameless,
    another_step,
    no_step,
    no_files,
    no_tensors,
    another_shape,
    another_dtype,
    another_file,
    no_meta,
    no_cursor,
    another_optimizer,
]


@pytest.mark.parametrize("alter", ALTERED)
def test_altered_metadata_end_the_run_with_one_line(
    alter: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    golden = GOLDEN / f"format-{FORMAT_VERSION}"
    shutil.copytree(golden / "checkpoints", tmp_path / "run" / "checkpoints")
    sign(tmp_path / "run" / "checkpoints" / "step-00000002", alter)
    ended = lab.run(lab.config(*SETTINGS), tmp_path / "run", resume=True)
    assert ended.code == 4, ended
    assert "\n" not in ended.error
    assert "step-00000002" in ended.error
    if alter is newer:
        assert "upgrade" in ended.error
        with pytest.raises(NoCheckpointError, match="newer"):
            CheckpointStore(tmp_path / "run" / "checkpoints").load()


class Unmarked:
    """Rows of one's own, without a fingerprint; wherever they are imported from."""

    __module__ = "rows"

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.arange(index + 2), "labels": torch.arange(index + 2)}


def texts(folder: Path) -> Text:
    (folder / "corpus.txt").write_text("\n\n".join(f"document {i}" for i in range(9)))
    return Text(str(folder / "corpus.txt"), overlong="cut")


def tokens(folder: Path) -> TokenWindows:
    (folder / "tokens.bin").write_bytes(bytes(range(200)))
    return TokenWindows(str(folder / "tokens.bin"), max_length=8)


def unmarked(folder: Path) -> Unmarked:
    return Unmarked()


FINGERPRINTS: dict[Callable[[Path], Any], str] = {
    texts: "cbd9ab3bcf2a19cb",
    tokens: "ccd9d7f1e1e3b43f",
    unmarked: "74fef81ff0abe058",
}


@pytest.mark.parametrize("data", FINGERPRINTS, ids=lambda data: data.__name__)
def test_data_keep_the_fingerprint_that_older_checkpoints_know(
    data: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one would refuse every run that goes on after an upgrade."""
    monkeypatch.setenv("TRAIN_CACHE", str(tmp_path / "cache"))
    assert fingerprint_of(data(tmp_path))[:16] == FINGERPRINTS[data]
