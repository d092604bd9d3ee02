"""Sum gradients over ranks bucket by bucket while the last backward of a step goes on.

Every rank sends every bucket once, in one order, whatever it computed: a rank whose memory ran out
or that has no micro-batch sends what it has. Only then do ranks agree, so a step can be replayed or
skipped as after any other; what was sent is dropped with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from trainer.core.errors import ConfigError
from trainer.core.tensors import gradient_dtype
from trainer.core.world import World


@final
class Overlap:
    """The gradients of whole copies as views of buckets, each summed as soon as it is full.

    `parameters` are those that are trained, in one order on every rank, and `buckets` the same in
    groups, in the order in which they are sent.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        buckets: Sequence[Sequence[nn.Parameter]],
        world: World,
    ) -> None:
        self._world, self._parameters, self._buckets = world, parameters, buckets
        self._flats = list[Tensor]()
        self._views, self._place = dict[nn.Parameter, Tensor](), dict[nn.Parameter, int]()
        for place, bucket in enumerate(buckets):
            sizes, dtype = [*map(torch.numel, bucket)], gradient_dtype(bucket[0])
            flat = torch.zeros(sum(sizes), dtype=dtype, device=world.device)
            self._flats.append(flat)
            for parameter, piece in zip(bucket, torch.split(flat, sizes), strict=True):
                self._views[parameter] = piece.view(parameter.shape)
                self._place[parameter] = place
        self._has_gradient = set[nn.Parameter]()
        # Of each bucket, what backward is yet to reach
        self._left = list[set[nn.Parameter]]()
        self._waits = list[Callable[[], Any]]()  # one for each bucket that was sent
        self.is_open = False  # between the beginning of a step and its last bucket
        self.is_last = False  # in the last micro-batch of this rank
        for parameter in parameters:
            hook: Any = parameter.register_post_accumulate_grad_hook
            hook(self._add)

    def begin(self) -> None:
        """Begin a step with gradients of zero."""
        self.is_open, self.is_last = True, False
        self._left = [*map(set, self._buckets)]
        self._has_gradient.clear()
        torch._foreach_zero_(self._flats)
        for parameter, view in self._views.items():
            parameter.grad = view

    def used(self) -> list[bool]:
        """Tell which parameters have a gradient, by a backward or assigned."""
        return [p in self._has_gradient or p.grad is not self._views[p] for p in self._parameters]

    def finish(self) -> None:
        """Send what was not sent, and wait for all. Collective."""
        while len(self._waits) < len(self._buckets):
            self._send()
        for wait in self._waits:
            wait()
        self._waits.clear()
        self.is_open = False

    def _add(self, parameter: Tensor) -> None:
        """Note a gradient, and send the buckets that it completes, in their order."""
        assert isinstance(parameter, nn.Parameter)
        self._has_gradient.add(parameter)
        if not (self.is_open and self.is_last):
            return
        left = self._left[self._place[parameter]]
        if parameter not in left:
            raise ConfigError(
                "sync=overlapped: the last micro-batch has a second backward, as reentrant "
                "checkpointing of a shared layer has, after gradients were sent: type sync=deferred"
            )
        left.remove(parameter)
        while len(self._waits) < len(self._buckets) and not self._left[len(self._waits)]:
            self._send()

    def _send(self) -> None:
        place = len(self._waits)
        for parameter in self._buckets[place]:
            view = self._views[parameter]
            # A strategy may have assigned a gradient of its own.
            if parameter.grad is not None and parameter.grad is not view:
                view.copy_(parameter.grad)
            parameter.grad = view
        self._waits.append(self._world.begin_sum(self._flats[place]))
