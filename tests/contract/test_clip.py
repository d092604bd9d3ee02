"""CLIP and SigLIP of transformers, cut as one likes, have the gradient of their own whole batch."""

from functools import partial

import numpy as np
import pytest
import torch
import transformers

from tests.lib.ranks_work import error, plain
from tests.lib.support import Bench
from trainer.accumulate.sum import Sum
from trainer.accumulate.two_pass import TwoPass
from trainer.features.contrastive.contrastive import Contrastive
from trainer.plan.cuts import Fixed
from trainer.training.step import train_step

EXACT, WRONG, NUM_PAIRS = 1e-10, 1e-2, 16
SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
TEXT = {**SIZES, "vocab_size": 20, "max_position_embeddings": 6, "pad_token_id": 1}
TEXT |= {"bos_token_id": 18, "eos_token_id": 19, "projection_size": 8}
VISION = {**SIZES, "image_size": 8, "patch_size": 4}


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
        return {
            "input_ids": ids,
            "pixel_values": torch.randn(3, 8, 8, generator=numbers, dtype=torch.float64),
        }


def clip() -> transformers.CLIPModel:
    config = transformers.CLIPConfig(text_config=TEXT, vision_config=VISION, projection_dim=8)
    return transformers.CLIPModel(config)


def siglip() -> transformers.SiglipModel:
    config = transformers.SiglipConfig(text_config=TEXT, vision_config=VISION)
    return transformers.SiglipModel(config)


def gradients(module: torch.nn.Module) -> dict[str, np.ndarray]:
    """Those that are not zero but for rounding, as that of a bias of keys is."""
    named = module.named_parameters()
    return {n: plain(p.grad) for n, p in named if not n.endswith("k_proj.bias")}


@pytest.mark.parametrize("build", [clip, siglip])
def test_the_step_is_that_of_the_models_own_loss_over_the_whole_batch(build):
    bench_of = partial(
        Bench, Fixed(micro=3), dataset=Captions(), model=build, objective=Contrastive()
    )

    def step(strategy):
        bench, found = bench_of(strategy=strategy), {}

        def keep(*_: object) -> None:
            found.update(gradients(bench.module))

        bench.context.optimizer.register_step_pre_hook(keep)
        report = train_step(bench.context, bench.feed.next(), bench.feed)
        bench.feed.close()
        return found, float(report.loss)

    (found, loss), (naive, _) = step(TwoPass(Contrastive())), step(Sum())
    module = bench_of().module
    samples = [Captions()[i] for i in range(NUM_PAIRS)]
    fields = {name: torch.stack([each[name] for each in samples]) for name in samples[0]}
    whole = module(**fields, return_loss=True).loss
    whole.backward()
    expected = gradients(module)
    assert loss == pytest.approx(float(whole.detach()), rel=EXACT)
    assert error(found, expected) <= EXACT
    assert error(naive, expected) > WRONG
