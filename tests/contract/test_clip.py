"""CLIP and SigLIP of transformers, cut as one likes, have the gradient of their own whole batch."""

from functools import partial

import numpy as np
import pytest
import torch
import transformers

from tests.lib.support import Bench, relative_error
from trainer.accumulate.sum import Sum
from trainer.accumulate.two_pass import TwoPass
from trainer.features.contrastive.contrastive import Contrastive
from trainer.plan.cuts import Fixed

EXACT, WRONG, NUM_PAIRS = 1e-10, 1e-2, 16
SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
TEXT = {**SIZES, "vocab_size": 20, "max_position_embeddings": 6, "pad_token_id": 1}
TEXT |= {"bos_token_id": 18, "eos_token_id": 19, "projection_size": 8}
CONFIG = {"text_config": TEXT, "vision_config": {**SIZES, "image_size": 8, "patch_size": 4}}


class Captions:
    """Pictures with a row of token ids each, which ends as CLIP wants it."""

    draws_randomness = False
    lengths = np.full(NUM_PAIRS, 6, dtype=np.int64)

    def __len__(self) -> int:
        return NUM_PAIRS

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        numbers = torch.Generator().manual_seed(i)
        ids = torch.randint(2, 18, (6,), generator=numbers)
        ids[-1] = 19
        pixels = torch.randn(3, 8, 8, generator=numbers, dtype=torch.float64)
        return {"input_ids": ids, "pixel_values": pixels}


def clip() -> torch.nn.Module:
    return transformers.CLIPModel(transformers.CLIPConfig(**CONFIG, projection_dim=8))


def siglip() -> torch.nn.Module:
    return transformers.SiglipModel(transformers.SiglipConfig(**CONFIG))


def not_zero(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Leave out what is zero but for rounding, the biases of keys."""
    return {n: each for n, each in gradients.items() if not n.endswith("k_proj.bias")}


@pytest.mark.parametrize("build", [clip, siglip])
def test_the_step_is_that_of_the_models_own_loss_over_the_whole_batch(build):
    how = {"dataset": Captions(), "model": build, "objective": Contrastive()}
    bench_of = partial(Bench, Fixed(micro=3), **how)
    found, loss = bench_of(strategy=TwoPass(Contrastive())).gradient_and_loss()
    naive, _ = bench_of(strategy=Sum()).gradient_and_loss()
    module = bench_of().module
    samples = [Captions()[i] for i in range(NUM_PAIRS)]
    fields = {name: torch.stack([each[name] for each in samples]) for name in samples[0]}
    whole = module(**fields, return_loss=True).loss
    whole.backward()
    expected = not_zero({name: p.grad for name, p in module.named_parameters()})
    assert loss == pytest.approx(float(whole.detach()), rel=EXACT)
    assert relative_error(not_zero(found), expected) <= EXACT
    assert relative_error(not_zero(naive), expected) > WRONG
