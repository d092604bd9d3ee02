"""Harness 12: the stored checkpoint of this format loads bit for bit, and altered ones do not.

`golden/format-N` was written by the program that had format N; what it holds is spelled out beside
it. Of an earlier format the weights can be taken over. A newer one is told from damage, and the
line says what to do.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.reliability import lab, toys
from tests.reliability.make_golden import GOLDEN, SETTINGS, expected
from tests.reliability.test_hostile_checkpoints import sign
from trainer.checkpoint.manifest import FORMAT_VERSION
from trainer.checkpoint.store import CheckpointStore
from trainer.checkpoint.weights import export, load_weights
from trainer.core.errors import NoCheckpointError
from trainer.data.text import Text
from trainer.data.tokens import TokenWindows
from trainer.data.view import DataView

GOLDEN_RUN = GOLDEN / f"format-{FORMAT_VERSION}"
EARLIER = GOLDEN / "format-2" / "checkpoints"


def test_a_golden_checkpoint_loads_bit_for_bit() -> None:
    wanted = json.loads((GOLDEN_RUN / "expected.json").read_text())
    assert json.loads(json.dumps(expected(GOLDEN_RUN / "checkpoints"))) == wanted


def test_a_golden_checkpoint_is_trained_on(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN_RUN / "checkpoints", tmp_path / "run" / "checkpoints")
    ended = lab.run(lab.config(*SETTINGS), tmp_path / "run", resume=True)
    assert ended.code == 0, ended
    assert CheckpointStore(tmp_path / "run" / "checkpoints").steps()[-1] == 3


def test_a_run_of_an_earlier_format_is_refused_in_one_line_that_names_init(tmp_path: Path) -> None:
    shutil.copytree(EARLIER, tmp_path / "run" / "checkpoints")
    ended = lab.run(lab.config(*SETTINGS), tmp_path / "run", resume=True)
    assert ended.code == 4
    path = tmp_path / "run" / "checkpoints" / "step-00000002"
    assert ended.error == (
        f"{path}: format 2 of an earlier version, which only gives weights: start a new run from "
        f"them with init={path}"
    )
    with pytest.raises(NoCheckpointError, match="init="):
        export(CheckpointStore(path.parent).load(), tmp_path / "export", {})


@pytest.mark.parametrize("path", [EARLIER.parent, EARLIER / "step-00000002"], ids=("run", "step"))
def test_a_new_run_takes_the_weights_of_an_earlier_format(path: Path) -> None:
    model = toys.Net(width=2, tied=True)
    load_weights(model, path)
    wanted = json.loads((EARLIER.parent / "expected.json").read_text())["tensors"]
    found = {f"model.{name}": lab.bits(tensor) for name, tensor in model.state_dict().items()}
    assert found
    for name, (kind, shape, whole) in found.items():
        assert [kind, list(shape), whole.hex()] == wanted[name]


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


def a_position_beyond_all(body: dict[str, Any]) -> None:
    body["meta"]["rng"]["numpy"][2] = 10**30


ALTERED = [
    a_list_for_a_contract,
    a_text_for_a_count,
    a_step_beyond_all,
    no_cut,
    a_number_for_tuning,
    a_position_beyond_all,
    newer,
    nameless,
    another_step,
    no_step,
    no_files,
    no_meta,
    no_cursor,
    another_optimizer,
]


@pytest.mark.parametrize("alter", ALTERED)
def test_altered_metadata_end_the_run_with_one_line(
    alter: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    shutil.copytree(GOLDEN_RUN / "checkpoints", tmp_path / "run" / "checkpoints")
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
    assert DataView(data(tmp_path)).fingerprint[:16] == FINGERPRINTS[data]
