"""What goes into the output layer stands in for logits where the logits are that layer's alone."""

from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests.lib.tune_support import assert_same, traces, workload
from trainer.models.bind import bind
from trainer.models.gpt import GPT
from trainer.objectives.next_token import LEAST_BYTES, NextToken
from trainer.tune.flops import count_compute

SIZES = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "vocab_size": 2**15}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0}


@pytest.mark.parametrize(("name", "is_output"), [("Llama", True), ("Gemma2", False)])
def test_a_fake_run_tells_models_that_change_what_their_output_layer_gives(name, is_output):
    options = {} if is_output else {"head_dim": 8}  # Gemma 2 caps its logits
    config = getattr(transformers, f"{name}Config")(**SIZES, **HEADS, **options)
    model = getattr(transformers, f"{name}ForCausalLM")(config).double()
    before = traces(model, runs=True)
    work = workload(model, objective=NextToken())
    count_compute(work, 1)
    assert_same(traces(model, runs=True), before)
    assert (work.model.call.output_layer is not None) == is_output
    fields = work.fields(2, 40)
    assert 4 * fields["labels"].numel() * SIZES["vocab_size"] > LEAST_BYTES
    losses, grads = [], []
    for call in (work.model.call, work.model.call.run):
        losses.append(NextToken().sums(call, fields).losses["cross_entropy"])
        grads.append(torch.autograd.grad(losses[-1], list(model.parameters())))
    # transformers normalises in float32, whatever the dtype of the model.
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-6)


class Capped(GPT):  # type: ignore[misc] # final
    """Caps its logits, as Gemma 2 does."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return 5 * torch.tanh(GPT.forward(self, input_ids) / 5)


class Passed(GPT):  # type: ignore[misc] # final
    """Gives its logits as they are."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids)


def capped(*sizes: int, hooks: bool = False, **options: Any) -> GPT:
    """Give a model of ours whose logits are capped by another forward, or by a hook."""
    model = GPT(*sizes, **options)
    if hooks:
        model.register_forward_hook(lambda _, __, logits: 5 * torch.tanh(logits / 5))
    else:
        model.forward = MethodType(Capped.forward, model)
    return model


@pytest.mark.parametrize(
    ("build", "is_output"),
    [(Capped, False), (Passed, True), (capped, False), (partial(capped, hooks=True), False)],
)
def test_a_model_of_ours_with_another_forward_is_looked_at_like_any_other(build, is_output):
    model = build(2**15, width=8, num_layers=1, num_heads=2)
    work = workload(model, objective=NextToken())
    count_compute(work, 1)
    assert (work.model.call.output_layer is not None) == is_output
    fields = work.fields(2, 40)
    assert 4 * fields["labels"].numel() * model.vocab_size > LEAST_BYTES
    with torch.no_grad():
        whole, found = (
            float(NextToken().sums(call, fields).losses["cross_entropy"])
            for call in (work.model.call.run, work.model.call)
        )
    assert found == pytest.approx(whole, rel=1e-6)


def test_compiled_or_not_a_model_runs_with_and_without_its_output_layer():
    model = GPT(31, width=8, num_layers=1, num_heads=2)
    call, fields = bind(model, autocast=torch.bfloat16), {"input_ids": torch.arange(14).view(2, 7)}
    for compiles in (False, True):
        if compiles:
            model.compile(backend="eager", dynamic=True)
        hidden, logits = call.without_output_layer(fields), call(fields)
        weight = call.output_layer.weight.to(hidden.dtype)
        assert torch.equal(hidden @ weight.T, logits)
        assert logits.dtype == hidden.dtype == torch.bfloat16
