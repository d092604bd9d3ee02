"""Draw tokens from a model, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


@torch.no_grad()
def generate(
    logits_of: Callable[[Tensor], Tensor],
    prompt_ids: Sequence[int],
    num_tokens: int,
    *,
    context: int,
    temperature: float = 0.8,
    seed: int = 0,
    stop_id: int | None = None,
    device: torch.device | str = "cpu",
) -> list[int]:
    """Continue a prompt; every token is one forward over the last `context` of them.

    The draw has a generator of its own, so that showing a sample changes no other random number.

    Args:
        logits_of: `(1, time)` token ids to logits, `(1, time, vocab)`; in evaluation mode.
        prompt_ids: at least one token id.
        num_tokens: most tokens to draw.
        context: most tokens the model takes.
        temperature: logits are divided by it; 0 takes the likeliest token.
        seed: of the draw.
        stop_id: ends the text; it is not returned.
        device: where the model is.

    Returns:
        The drawn ids, without the prompt.
    """
    # Drawn on the CPU: the same seed gives the same text from the same logits on every device.
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt_ids)
    for _ in range(num_tokens):
        window = torch.tensor([ids[-context:]], device=device)
        last = logits_of(window)[0, -1].float().cpu()
        if temperature == 0.0:
            drawn = last.argmax()
        else:
            drawn = torch.multinomial((last / temperature).softmax(-1), 1, generator=generator)
        token = int(drawn)
        if token == stop_id:
            break
        ids.append(token)
    return ids[len(prompt_ids) :]
