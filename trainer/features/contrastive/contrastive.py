"""Compare the two embeddings of every sample with those of all others of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from trainer.config.components import Positive
from trainer.core.coupling import Coupling
from trainer.core.errors import ConfigError
from trainer.core.micro_batch import Fields, output_part
from trainer.features.contrastive.text_pairs import content_digests, embed
from trainer.objectives.base import ModelCall, Sums, at_least_single
from trainer.objectives.coupled import CoupledObjective
from trainer.objectives.text_output import TextOutput

SIDES = (("query", "document"), ("text_embeds", "image_embeds"))
"""Names of the two embeddings in what a model gives."""
SCALE, BIAS = "logit_scale", "logit_bias"
"""Of the model, as in CLIP and SigLIP: the logarithm of what cosines are multiplied by, and what is
added to them then."""
DIGESTS = "digests"  # of a sample's texts and image, among its rows
FIXED = 0.05  # temperature of a model without a scale
MAX_LOG_SCALE = math.log(100)  # of the scale, as in CLIP; beyond it training is unstable
RECALLED = (1, 5, 10)
SCORE_ROWS = 1024  # rows of the matrix of scores that are there at once


@final
@dataclass(frozen=True, kw_only=True)
class Contrastive(CoupledObjective):
    """InfoNCE in both directions (Radford et al. 2021, 2103.00020), or SigLIP's loss (2303.15343).

    Scores are cosines times a scale, in fp32 at least. InfoNCE is the mean of two cross entropies,
    each query's document among all documents and each document's query among all queries. SigLIP's
    is the binary cross entropy of all pairs. Both are divided by the number of samples. Samples
    with an equal text (`input_ids` and `attention_mask`) or image (`pixel_values`) are not
    negatives of each other.

    Metrics of an evaluation are `recall_at_1`, `_5` and `_10`: the share of queries whose document
    is among so many with the highest scores, of all documents that are held out. A tie counts
    against it; of `k` pairs or fewer `recall_at_k` is 1. `scale` is that of the step.
    """

    coupling = Coupling("batch", why="it compares all samples of a step")
    metric_names = ("scale", *(f"recall_at_{k}" for k in RECALLED))
    min_samples = 2

    loss: Literal["infonce", "siglip"] | None = None
    temperature: Positive | None = None

    def weights(self, fields: Fields) -> Mapping[str, float]:
        """Count samples."""
        count = float(len(next(iter(fields.values()))))
        return dict.fromkeys(("contrastive", *self.metric_names), count)

    def rows(self, model: ModelCall, fields: Fields) -> Mapping[str, Tensor]:
        """Embed the samples of a micro-batch.

        Gives `query` and `document`, `(samples, width)` of length 1; once for each sample the
        model's scale and bias; and the digests of its contents.
        """
        output = embed(model, fields)
        sides = embeddings_of(output)
        query, document = (F.normalize(at_least_single(side), dim=-1) for side in sides)
        rows = {"query": query, "document": document}
        for name in (SCALE, BIAS):
            value = output_part(output, name)
            # A root's own parameters are there after its forward, sharded or not.
            if value is None:
                value = getattr(getattr(model, "module", None), name, None)
            if value is None:
                continue
            if not isinstance(value, Tensor) or value.numel() != 1:
                kind = type(value).__name__
                if isinstance(value, Tensor):
                    kind = f"shape {(*value.shape,)}"
                raise ConfigError(
                    f"model.{name}: has {kind}, and objective=contrastive "
                    "takes a parameter of one number: make it nn.Parameter(torch.tensor([2.66])), "
                    "or give it another name"
                )
            rows[name] = at_least_single(value.reshape(())).expand(len(sides[0]))
        if (digests := content_digests(fields)) is not None:
            rows[DIGESTS] = digests
        return rows

    def predict(
        self, model: ModelCall, fields: Fields, text: TextOutput
    ) -> Sequence[Mapping[str, Any]]:
        """Give the embedding of each sample, of length 1; of samples with two sides both by name.

        Raises:
            ConfigError: the model gives no embedding.
        """
        output = embed(model, fields)
        sides = dict[str, list[list[float]]]()
        for name in chain.from_iterable(SIDES):
            side = output_part(output, name)
            if isinstance(side, Tensor):
                sides[name] = F.normalize(at_least_single(side), dim=-1).tolist()
        if not sides:
            embeddings_of(output)  # which says what it takes
        found = list[dict[str, Any]]()
        for embeddings in zip(*sides.values(), strict=True):
            prediction: Any = dict(zip(sides, embeddings, strict=True))
            if len(sides) == 1:
                (prediction,) = embeddings
            found.append({"prediction": prediction})
        return found

    def sums_of_rows(self, rows: Mapping[str, Tensor]) -> Sums:
        """See the base class; SigLIP's loss needs a model with scale and bias to learn."""
        query, document, count = rows["query"], rows["document"], len(rows["query"])
        pairs = query, document, rows.get(DIGESTS, query.new_zeros(count, 0))
        loss = self.loss or ("siglip" if BIAS in rows else "infonce")
        if loss == "siglip" and (BIAS not in rows or (SCALE not in rows and not self.temperature)):
            raise ConfigError(
                f"objective.loss=siglip: needs {SCALE} and {BIAS}, parameters of the model of "
                "shape (1,): add them, or type objective.loss=infonce"
            )
        if self.temperature is not None or SCALE not in rows:
            scale = torch.tensor(1 / (self.temperature or FIXED), dtype=torch.float64)
        else:
            scale = rows[SCALE].mean()
            # The gradient is that at the bound, so that the scale can come back from beyond it.
            if loss == "infonce":
                scale = scale + (MAX_LOG_SCALE - scale).clamp(max=0).detach()
            scale = scale.exp()
        scale = scale.to(query.dtype)
        bias = rows[BIAS].mean() if loss == "siglip" else scale.new_zeros(())
        own = (query * document).sum(1) * scale + bias
        # softplus(-x) = softplus(x) - x for each sample's own pair
        if loss == "siglip":
            (sums,) = _by_chunks(_softplus, *pairs, scale, bias)
            total = torch.cat(sums).sum() - own.sum()
        else:
            queries, documents = _by_chunks(_log_sums, *pairs, scale, bias)
            both = torch.cat(queries) + torch.stack(documents).logsumexp(0)
            total = (both / 2 - own).sum()
        # Times the samples, by whose number metrics are divided
        metrics = {"scale": scale.detach() * count}
        if not torch.is_grad_enabled():
            metrics |= _recalls(*pairs)
        return Sums(losses={"contrastive": total}, metrics=metrics)


def embeddings_of(output: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401 - models return what they like
    """Find the two embeddings in what a model gives, `(samples, width)` each."""
    shapes = list[str]()
    for names in SIDES:
        pair = list[Tensor]()
        for name in names:
            if isinstance(part := output_part(output, name), Tensor):
                pair.append(part)
                shapes.append(f"{name} {tuple(part.shape)}")
        if len(pair) == 2 and pair[0].shape == pair[1].shape and pair[0].ndim == 2:  # noqa: PLR2004
            return pair[0], pair[1]
    kind = "Tensor" if isinstance(output, Tensor) else type(output).__name__
    raise ConfigError(
        f"model: forward gives {', '.join(shapes) or 'no embeddings'} in a {kind}: "
        "objective=contrastive needs two of one shape (samples, width); return a mapping with "
        "query and document, or text_embeds and image_embeds"
    )


def _by_chunks(
    compute: Callable[..., Sequence[Tensor]], query: Tensor, *others: Tensor
) -> list[tuple[Tensor, ...]]:
    """Compute for some queries at a time; of several chunks no scores are left for the backward."""
    starts = range(0, len(query), SCORE_ROWS)
    if len(starts) > 1:
        compute = partial(checkpoint, compute, use_reentrant=False, preserve_rng_state=False)
    return [*zip(*(compute(start, query, *others) for start in starts), strict=True)]


def _scores(
    start: int,
    query: Tensor,
    document: Tensor,
    digests: Tensor,
    scale: Tensor | float = 1.0,
    bias: Tensor | float = 0.0,
) -> Tensor:
    """Score a chunk of queries; -inf where another sample is no negative."""
    chunk = slice(start, start + SCORE_ROWS)
    is_equal = (digests[chunk, None] == digests).any(-1)
    # A sample equals itself, and its own pair counts.
    is_equal.diagonal(start).zero_()
    return (query[chunk] @ document.T * scale + bias).masked_fill(is_equal, -math.inf)


def _log_sums(start: int, *pairs: Tensor) -> Sequence[Tensor]:
    """Sum exponentials: of each query over documents, and of each document over these queries."""
    scores = _scores(start, *pairs)
    return scores.logsumexp(1), scores.logsumexp(0)


def _softplus(start: int, *pairs: Tensor) -> Sequence[Tensor]:
    return (F.softplus(_scores(start, *pairs)).sum(1),)


def _recalls(query: Tensor, document: Tensor, digests: Tensor) -> dict[str, Tensor]:
    """Count the queries whose own document is among the first by score."""
    ranks = []
    for start in range(0, len(query), SCORE_ROWS):
        scores = _scores(start, query, document, digests)
        own = scores.diagonal(start)
        # What is not a number is found by no query, however few documents there are.
        ranks.append((~(scores < own[:, None])).sum(1) + RECALLED[-1] * own.isnan())
    return {f"recall_at_{k}": (torch.cat(ranks) <= k).sum() for k in RECALLED}
