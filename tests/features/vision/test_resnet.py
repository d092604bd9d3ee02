"""The models of images take any size."""

import pytest
import torch

from trainer.features.vision.resnet import ResNet
from trainer.features.vision.vit import ViT, positions_of_grid


@pytest.mark.parametrize(
    "model",
    [ResNet(5, 3, 8, depth=2, stages=2), ResNet(5, 3, 8, stride=4), ViT(5, 3, 2, 8, 2, 2)],
    ids=["resnet", "stride", "vit"],
)
def test_images_of_any_size_give_a_score_for_each_class(model):
    for size in ((8, 8), (32, 24)):
        logits = model(torch.rand(3, 3, *size))
        assert logits.shape == (3, 5)
    logits.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())


def test_a_vit_tells_patches_apart_by_their_place():
    table = positions_of_grid(torch.zeros(1, 8, 3, 5, dtype=torch.float64))
    assert table.shape == (15, 8)
    assert len(table.unique(dim=0)) == 15
    model, image = ViT(5, 1, 2, 8, 2, 2), torch.rand(1, 1, 4, 4)
    assert not model(image).allclose(model(image.flip(-1)))
