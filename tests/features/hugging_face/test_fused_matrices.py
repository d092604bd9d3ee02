"""Fused matrices of transformers: what is said to be the value's rows makes the values."""

import pytest
import torch
import transformers

from trainer.models.facts import facts_of

SIZES = {"vocab_size": 11, "max_position_embeddings": 16, "attention_dropout": 0.0}
DEEP = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
KINDS = {
    "GPT2": {"vocab_size": 11, "n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2},
    "GPTNeoX": SIZES | DEEP,
    "Bloom": {"vocab_size": 11, "hidden_size": 8, "n_layer": 1, "n_head": 2},
    "Phi3": SIZES | DEEP | {"num_key_value_heads": 1, "pad_token_id": 0},
}
OUTPUTS = {"c_proj", "dense", "o_proj"}
"""What takes the values of all heads."""


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_made_by_the_last_of_the_matrices_alone(kind):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**KINDS[kind])
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    (name,) = [name for name, each in facts_of(model).fused().items() if each.num_matrices == 3]
    fused, weight, outputs = facts_of(model).fused()[name], model.get_parameter(name), []
    owner = model.get_submodule(name.rpartition(".")[0].rpartition(".")[0])
    last = next(each for part, each in owner.named_children() if part in OUTPUTS)
    last.register_forward_pre_hook(lambda _, given: outputs.append(given[0]))
    parts = fused.split(weight.detach())
    for place in range(3):
        with torch.no_grad():
            rest = [part * (other != place) for other, part in enumerate(parts)]
            fused.write(rest, weight)
            model(input_ids=torch.tensor([[1, 5, 3, 7]]))
    # Without query, or without key, all positions are attended to alike.
    assert outputs[2].abs().max() < 1e-6 < outputs[0].std()
    assert (outputs[0] - outputs[1]).abs().max() < 1e-6


def test_layers_that_lie_transposed_are_known():
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**KINDS["GPT2"]))
    found = facts_of(model).fused()
    up = found["transformer.h.0.mlp.c_fc.weight"]
    assert (up.num_matrices, up.outputs, up.is_transposed) == (1, (32,), True)
