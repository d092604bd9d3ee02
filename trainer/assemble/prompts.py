"""Encode the prompts of `log.generate` as the data of a run encode theirs."""

from __future__ import annotations

from trainer.assemble.components import Components
from trainer.core.errors import ConfigError
from trainer.data.samples import faults_of
from trainer.training.generation import Prompts


def prompts_of(components: Components) -> Prompts | None:
    """Encode them; None where there are none.

    Raises:
        ConfigError: the model, or the data, cannot continue text, or a prompt leaves no room.
    """
    texts, most = components.config.log.generate, components.config.log.generate_tokens
    if not texts:
        return None
    data, objective = components.train_set, components.objective
    encode, decode = data.optional("prompt"), data.optional("decode")
    fault = None
    if not objective.predicts_next:
        fault = f"objective={type(objective).__name__} predicts no next token; leave it out"
    elif encode is None or decode is None:
        fault = f"{data.kind} has no `prompt` and `decode`, which turn text into tokens and back"
    elif not components.held_out:
        fault = "nothing is held out, so nothing is evaluated: type data.holdout=0.05"
    if fault is not None:
        raise ConfigError(f"log.generate: {fault}")
    with faults_of(f"`prompt` of {data.kind}"):
        pairs = [(ids, ends) for ids, ends in map(encode, texts)]
        tokens = [[int(token) for token in ids] for ids, _ in pairs]
    # Positions beyond those of the data have not been learned, or are none of the model's.
    limit = data.optional("max_length") or int(components.source.lengths.max())
    longest = max(map(len, tokens))
    for text, ids in zip(texts, tokens, strict=True):
        if not 0 < len(ids) < limit:
            raise ConfigError(
                f"log.generate: {text!r:.40} has {len(ids)} tokens; 1 to {limit - 1} leave room "
                "for one that follows"
            )
    return Prompts(
        texts=texts,
        tokens=tokens,
        ends=frozenset(end for _, ends in pairs for end in ends),
        decode=decode,
        pad_token=data.facts.pad_token_id,
        length=min(longest + most, limit),
        most=most,
        vocab_size=data.facts.vocab_size,
    )
