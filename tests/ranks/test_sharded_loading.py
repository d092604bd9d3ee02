"""Two ranks that each read their shards of a model of transformers from its files."""

from pathlib import Path

import numpy as np
import torch

from tests.lib.heads import save_causal_model
from trainer.core.tensors import is_sharded
from trainer.core.world import World
from trainer.features.hugging_face.models import hugging_face
from trainer.models.bind import bind
from trainer.models.first_weights import FIRST_WEIGHTS
from trainer.models.recompute import blocks_of
from trainer.parallel.fsdp import Sharded, make_mesh


def loaded(world: World, folder: str) -> tuple[dict[str, np.ndarray], int]:
    """The whole parameters that two ranks have, and the bytes that this one holds of them."""
    with torch.device("meta"):
        module, _ = hugging_face(folder)
    weights = vars(module).pop(FIRST_WEIGHTS)
    Sharded(module, bind(module), blocks_of(module), world, make_mesh(world), weights=weights)
    held = [p.to_local() if is_sharded(p) else p for p in module.parameters()]
    whole = {name: p.full_tensor().detach().numpy() for name, p in module.named_parameters()}
    return whole, sum(p.nbytes for p in held)


def test_every_rank_has_its_rows_of_the_weights_of_a_bf16_file_in_fp32(ranks, tmp_path):
    save_causal_model(tmp_path, max_shard_size=500)
    assert len([*Path(tmp_path).glob("*.safetensors")]) > 1
    expected = {n: p.detach().numpy() for n, p in hugging_face(str(tmp_path))[0].named_parameters()}
    size = sum(each.nbytes for each in expected.values())
    for found, held in ranks.run(2, loaded, str(tmp_path)):
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[name], value) for name, value in expected.items())
        assert held < 0.6 * size
