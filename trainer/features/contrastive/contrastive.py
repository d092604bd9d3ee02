"""Compare the two embeddings of every sample with those of all others of the step."""

from __future__ import annotations

import math
import zlib
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
from trainer.features.contrastive.text_pairs import NEGATIVES, content_digests, embed
from trainer.objectives.base import ModelCall, Sums, at_least_single
from trainer.objectives.coupled import CoupledObjective
from trainer.objectives.text_output import TextOutput

SIDES = (("query", "document"), ("text_embeds", "image_embeds"))
"""Names of the two embeddings in what a model gives."""
SCALE, BIAS = "logit_scale", "logit_bias"
"""Of the model, as in CLIP and SigLIP: the logarithm of what cosines are multiplied by, and what is
added to them then."""
DIGESTS = "digests"  # of a sample's pair of texts, its image and its ids, among its rows
NEGATIVE_DIGESTS = "negative_digests"  # of the texts of its hard negatives
IDS = ("id", "anchor_id", "positive_id")
"""Fields of one whole number: samples in which one is equal are no negatives of each other."""
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
    with an equal text (`input_ids` and `attention_mask`), image (`pixel_values`) or id are not
    negatives of each other. Without `symmetric` a document's query is not looked for.

    Hard negatives of all samples are documents too that a query could find; they look for none. A
    text is none of a query that it is the document of, in this sample or in one of those above.

    Metrics of an evaluation are `recall_at_1`, `_5` and `_10`: the share of queries whose document
    is among so many with the highest scores, of all documents, and negatives, that are held out. A
    tie counts against it; of `k` texts or fewer `recall_at_k` is 1. `scale` is that of the step.
    """

    coupling = Coupling("batch", why="it compares all samples of a step")
    metric_names = ("scale", *(f"recall_at_{k}" for k in RECALLED))
    min_samples = 2

    loss: Literal["infonce", "siglip"] | None = None
    temperature: Positive | None = None
    symmetric: bool = True

    def weights(self, fields: Fields) -> Mapping[str, float]:
        """Count samples."""
        count = float(len(next(iter(fields.values()))))
        return dict.fromkeys(("contrastive", *self.metric_names), count)

    def rows(self, model: ModelCall, fields: Fields) -> Mapping[str, Tensor]:
        """Embed the samples of a micro-batch.

        Gives `query` and `document`, `(samples, width)` of length 1; once for each sample the
        model's scale and bias; and the digests of its contents.
        """
        if "score" in fields:
            raise ConfigError(
                "objective=contrastive: takes every pair as a positive, and these have a score: "
                "type objective=cosent, or 'data.columns={score:null}'"
            )
        output = embed(model, fields)
        sides = embeddings_of(output)
        rows = {"query": unit(sides[0]), "document": unit(sides[1])}
        if isinstance(negatives := output_part(output, NEGATIVES), Tensor):
            rows[NEGATIVES] = unit(negatives)
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
        rows |= _digests_of(fields, rows)
        return rows

    def predict(
        self, model: ModelCall, fields: Fields, text: TextOutput
    ) -> Sequence[Mapping[str, Any]]:
        """Give the embedding of each sample, of length 1; of samples with two sides both by name.

        Raises:
            ConfigError: the model gives no embedding.
        """
        return embeddings_by_name(embed(model, fields))

    def sums_of_rows(self, rows: Mapping[str, Tensor]) -> Sums:
        """See the base class; SigLIP's loss needs a model with scale and bias to learn."""
        query, document, count = rows["query"], rows["document"], len(rows["query"])
        documents, none = document, query.new_zeros(count, 0)
        if NEGATIVES in rows:
            documents = torch.cat([document, rows[NEGATIVES].flatten(0, 1)])
        digests, of_negatives = rows.get(DIGESTS, none), rows.get(NEGATIVE_DIGESTS, none)
        pairs = query, documents, digests, of_negatives
        loss = self.loss or ("siglip" if BIAS in rows else "infonce")
        if loss == "siglip" and not self.symmetric:
            raise ConfigError(
                "objective.symmetric=false: the loss siglip has no directions; leave it out, or "
                "type objective.loss=infonce"
            )
        if loss == "siglip" and (BIAS not in rows or (SCALE not in rows and not self.temperature)):
            raise ConfigError(
                f"objective.loss=siglip: needs {SCALE} and {BIAS}, parameters of the model of "
                "shape (1,): add them, or type objective.loss=infonce"
            )
        if self.temperature is not None or SCALE not in rows:
            scale = query.new_full((), 1 / (self.temperature or FIXED))
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
            of_queries, of_documents = _by_chunks(_log_sums, *pairs, scale, bias)
            log_sums = torch.cat(of_queries)
            if self.symmetric:
                log_sums = (log_sums + torch.stack(of_documents).logsumexp(0)) / 2
            total = (log_sums - own).sum()
        # Times the samples, by whose number metrics are divided
        metrics = {"scale": scale.detach() * count}
        if not torch.is_grad_enabled():
            metrics |= _recalls(*pairs)
        return Sums(losses={"contrastive": total}, metrics=metrics)


def embeddings_by_name(output: Any) -> Sequence[Mapping[str, Any]]:  # noqa: ANN401 - as below
    """Give the embedding of each sample as a prediction; of two sides both by name."""
    parts = {name: output_part(output, name) for name in chain.from_iterable(SIDES)}
    sides = {name: unit(each).tolist() for name, each in parts.items() if isinstance(each, Tensor)}
    if not sides:
        embeddings_of(output)  # which says what it takes
    if len(sides) == 1:
        return [{"prediction": embedding} for embedding in chain(*sides.values())]
    rows = zip(*sides.values(), strict=True)
    return [{"prediction": dict(zip(sides, row, strict=True))} for row in rows]


def unit(embeddings: Tensor) -> Tensor:
    """Bring embeddings, `(..., width)`, to length 1, in fp32 at least."""
    return F.normalize(at_least_single(embeddings), dim=-1)


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


def _digests_of(fields: Fields, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Give digests of what a sample and its hard negatives hold, where it is known."""
    contents, found = content_digests(fields), dict[str, Tensor]()
    parts = [] if contents is None else [contents]
    num_texts = 2 + rows[NEGATIVES].shape[1] if NEGATIVES in rows else None
    if contents is not None and contents.shape[1] == num_texts:
        parts, found[NEGATIVE_DIGESTS] = [contents[:, :2]], contents[:, 2:]
    for name in IDS:
        if name in fields:
            # A number of one column is none of another's, nor a digest.
            parts.append(fields[name].view(-1, 1) + (zlib.crc32(name.encode()) << 30))
    if parts:
        found[DIGESTS] = torch.cat(parts, 1)
    return found


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
    of_negatives: Tensor,
    scale: Tensor | float = 1.0,
    bias: Tensor | float = 0.0,
) -> Tensor:
    """Score a chunk of queries; -inf where a document is no negative."""
    chunk = slice(start, start + SCORE_ROWS)
    is_equal = (digests[chunk, None] == digests).any(-1)
    # A document that is the query itself, where both are texts
    if digests.shape[1] > 1:
        is_equal |= digests[chunk, :1] == digests[:, 1]
    if of_negatives.numel():
        is_equal = torch.cat([is_equal, _known(is_equal, chunk, digests, of_negatives)], 1)
    # A sample equals itself, and its own pair counts.
    is_equal.diagonal(start).zero_()
    scores = query[chunk] @ document.T * scale + bias
    return scores.masked_fill(F.pad(is_equal, (0, len(document) - is_equal.shape[1])), -math.inf)


def _known(is_equal: Tensor, chunk: slice, digests: Tensor, of_negatives: Tensor) -> Tensor:
    """Mark the hard negatives that are none of a chunk of queries, `(queries, negatives)`.

    They are the query itself, or the document of a sample that `is_equal`; or of their own sample.
    """
    queries, documents = digests[chunk, :1], digests[:, 1].contiguous()
    texts = of_negatives.flatten().contiguous()
    # Equal documents are found at one place of their order, which no device has to be asked for.
    ordered = documents.sort().values
    own, other = (
        torch.searchsorted(ordered, each).clamp(max=len(ordered) - 1) for each in (documents, texts)
    )
    counts = torch.zeros(is_equal.shape, device=texts.device).index_add(1, own, is_equal.float())
    is_known = (counts[:, other] > 0) & (ordered[other] == texts)
    return is_known | (queries == texts) | (of_negatives == documents[:, None]).flatten()


def _log_sums(start: int, *pairs: Tensor) -> Sequence[Tensor]:
    """Sum exponentials: of each query over documents, and of each document over these queries.

    The latter not of hard negatives, which belong to no query.
    """
    scores = _scores(start, *pairs)
    return scores.logsumexp(1), scores[:, : len(pairs[0])].logsumexp(0)


def _softplus(start: int, *pairs: Tensor) -> Sequence[Tensor]:
    return (F.softplus(_scores(start, *pairs)).sum(1),)


def _recalls(query: Tensor, *others: Tensor) -> dict[str, Tensor]:
    """Count the queries whose own document is among the first by score."""
    ranks = []
    for start in range(0, len(query), SCORE_ROWS):
        scores = _scores(start, query, *others)
        own = scores.diagonal(start)
        # What is not a number is found by no query, however few documents there are.
        ranks.append((~(scores < own[:, None])).sum(1) + RECALLED[-1] * own.isnan())
    return {f"recall_at_{k}": (torch.cat(ranks) <= k).sum() for k in RECALLED}
