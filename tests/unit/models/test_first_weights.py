"""Models that cannot be trained here are refused as they are built, by the name of the weight."""

import pytest
from torch import nn

from trainer.core.errors import ConfigError
from trainer.models.first_weights import refuse_lazy_or_sparse


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (nn.LazyLinear(4), "model: 0.weight has no shape before the first forward"),
        (nn.LazyBatchNorm1d(affine=False), "model: 0.running_mean has no shape"),
        (nn.Embedding(4, 2, sparse=True), "model: 0 gives sparse gradients"),
        (nn.EmbeddingBag(4, 2, sparse=True), "model: 0 gives sparse gradients"),
    ],
)
def test_weights_without_a_shape_and_sparse_gradients_are_refused(part, text):
    with pytest.raises(ConfigError, match=text):
        refuse_lazy_or_sparse(nn.Sequential(part))
    refuse_lazy_or_sparse(nn.Sequential(nn.Linear(2, 4), nn.Embedding(4, 2)))
