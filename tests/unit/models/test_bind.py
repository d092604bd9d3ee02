"""A weight is cast once a step, and gradients are those of casting it in every call."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.lib.support import VOCABULARY, Bench
from trainer.accumulate.base import Computed, Pass
from trainer.accumulate.sum import Sum
from trainer.core.errors import DataError
from trainer.models.bind import bind
from trainer.parallel.base import Replicated
from trainer.plan.cuts import Fixed

WIDTH = 8


class Plain(nn.Module):
    """Two products, the second with a weight of many names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def middle(self, hidden: Tensor) -> Tensor:
        return self.inner(hidden).relu()

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.middle(self.embed(input_ids)))


class Reentrant(Plain):
    """Computes its middle under `no_grad` first, and again in backward."""

    def middle(self, hidden: Tensor) -> Tensor:
        return checkpoint(super().middle, hidden, use_reentrant=True)


class Teaching(Plain):
    """Looks at itself without gradients before every pass, by turns."""

    calls = 0

    def forward(self, input_ids: Tensor) -> Tensor:
        self.calls += 1
        with torch.set_grad_enabled(self.calls % 2 == 0):
            goal = super().forward(input_ids).detach()
        return super().forward(input_ids) + goal


class Tied(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class Rescaled(Plain):
    """Writes a weight in every forward, before it is used, as data-dependent scales are."""

    @torch.no_grad()
    def write(self, weight: Tensor, factor: Tensor) -> None:
        weight.mul_(factor)

    def forward(self, input_ids: Tensor) -> Tensor:
        self.write(self.head.weight, 1 + input_ids.float().mean() / VOCABULARY)
        return super().forward(input_ids)


class RescaledUncounted(Rescaled):
    def write(self, weight: Tensor, factor: Tensor) -> None:
        weight.data.mul_(factor)


class Look(Pass):
    """Looks at every micro-batch without gradients."""

    records_gradients = False

    def micro_batch(self, model: Any, objective: Any, micro_batch: Any, *rest: Any) -> Computed:
        objective.sums(model.call, micro_batch.fields)
        return Computed()


class TwoPasses(Sum):
    before = (Look(),)


class Each(Sum):
    """Casts in every call: the outermost context ends with each, as without `Casts.once`."""

    def walk(self, model: Any, *rest: Any, **how: Any) -> Computed:
        call = model.call

        def alone(fields: Any) -> Any:
            torch.clear_autocast_cache()
            found = call(fields)
            torch.clear_autocast_cache()
            return found

        alone.module = model.module  # type: ignore[attr-defined]
        model.call = alone
        found = super().walk(model, *rest, **how)
        model.call = call
        return found


class Counts(TorchDispatchMode):
    """Counts conversions of a weight to bfloat16."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight, self.count = weight, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") == torch.bfloat16:
            self.count += args[0].data_ptr() == self.weight.data_ptr()
        return func(*args, **kwargs)


def bench(model: Any, strategy: Any) -> Bench:
    def lay_out(module: nn.Module, world: Any) -> Replicated:
        call = bind(module, autocast=torch.bfloat16)
        return Replicated(module, call, [*module.parameters()], world)

    return Bench(Fixed(micro=4), torch.float32, model=model, strategy=strategy, lay_out=lay_out)


def test_a_weight_is_cast_once_a_pass_and_again_after_the_update():
    for strategy, count in ((Sum(), 1), (TwoPasses(), 2), (Each(), 4)):
        made = bench(Plain, strategy)
        with Counts(made.module.inner.weight) as casts:
            made.step()
            assert casts.count == count
            made.step()
            assert casts.count == 2 * count


@pytest.mark.parametrize(
    ("model", "strategy"),
    [
        *((model, Sum()) for model in (Reentrant, Teaching, Rescaled, RescaledUncounted)),
        (Tied, TwoPasses()),
    ],
)
def test_gradients_are_those_of_casting_in_every_call(model, strategy):
    once, each = bench(model, strategy), bench(model, Each())
    for _ in range(2):  # the second with other weights
        found, expected = once.gradient_and_loss(), each.gradient_and_loss()
        assert found[1] == expected[1]
        assert found[0].keys() == expected[0].keys()
        assert all(torch.equal(found[0][n], expected[0][n]) for n in expected[0])
        assert all(gradient.any() for gradient in found[0].values())


class Takes(nn.Module):
    """Computes with one field, beside token ids."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(4, 4), layer

    def forward(self, input_ids: Tensor, x: Tensor) -> Any:
        self.embed(input_ids)
        return self.layer(x)


class Times(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


@pytest.mark.parametrize(
    ("layer", "dtype"),
    [
        (nn.Linear(4, 4), torch.float64),
        (nn.Conv1d(3, 4, 1), torch.uint8),
        (nn.GRU(4, 4), torch.int64),
        (Times(), torch.float64),
    ],
    ids=str,
)
def test_a_field_of_another_dtype_than_the_weights_is_named_with_what_to_do(layer, dtype):
    fields = {"input_ids": torch.tensor([1]), "x": torch.ones(2, 3, 4, dtype=dtype)}
    named = "field input_ids|field x" if dtype == torch.int64 else "field x"
    for autocast in (None, torch.bfloat16):
        call = bind(Takes(layer), autocast=autocast)
        text = rf"data: ({named}) is {dtype}, and the weights of Takes are torch.float32 .* in the"
        with pytest.raises(DataError, match=text) as caught:
            call(fields)
        assert ("/ 255" in str(caught.value)) == (dtype != torch.float64)


def test_a_hugging_face_model_with_a_mask_gives_no_cache_and_its_config_stays():
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 9}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=1)
    model = transformers.LlamaForCausalLM(config)
    fields = dict.fromkeys(("input_ids", "attention_mask"), torch.ones(1, 4, dtype=torch.int64))
    assert list(bind(model)(fields)) == ["logits"]
    assert model.config.use_cache
