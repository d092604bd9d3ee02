"""The transformer, the binding of any model to its fields, and the sampler."""

import math

import pytest
import torch
from torch import Tensor, nn

from trainer.core.errors import ConfigError
from trainer.data.collate import pack_samples
from trainer.models.attention import BLOCK, Documents, causal_attention, has_varlen_kernel
from trainer.models.bind import bind
from trainer.models.gpt import GPT, Attention

TINY = {"vocab_size": 17, "width": 24, "num_layers": 2, "num_heads": 2, "max_length": 16}
GPT2 = {"norm": "layer", "mlp": "gelu", "positions": "learned", "bias": True, "tied": True}
FAMILIES = pytest.mark.parametrize("options", [TINY, TINY | GPT2], ids=["modern", "gpt2"])
CLOSE = {"rtol": 1e-12, "atol": 1e-13}


def make(options: dict, seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    model = GPT(**options).double()
    # Large weights make every path matter to the output.
    model.init_weights(std=0.5)
    return model


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(17, shape, generator=torch.Generator().manual_seed(seed))


def test_the_sizes_are_those_of_gpt2_and_of_the_tiny_model():
    large = {"vocab_size": 50257, "width": 768, "num_layers": 12, "num_heads": 12}
    with torch.device("meta"):
        gpt2, tiny = GPT(**large, max_length=1024, **GPT2), GPT()
    assert sum(p.numel() for p in gpt2.parameters()) == 124_439_808
    per_block = 2 * 96 + 4 * 96 * 96 + 3 * 96 * 256
    assert sum(p.numel() for p in tiny.parameters()) == 2 * 258 * 96 + 2 * per_block + 96
    assert (tiny.vocab_size, tiny.max_length) == (258, 256)


@FAMILIES
def test_no_token_sees_the_tokens_after_it_nor_padding_on_the_right(options):
    model = make(options)
    ids = tokens(2, 9)
    changed = ids.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 17
    before, after = model(ids), model(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5], **CLOSE)
    assert (before[:, 5:] - after[:, 5:]).abs().max() > 1e-3
    padded = torch.nn.functional.pad(ids, (0, 6))
    torch.testing.assert_close(model(padded)[:, :9], before, **CLOSE)


@FAMILIES
def test_packed_documents_give_the_logits_and_gradients_of_documents_alone(options):
    model = make(options)
    documents = [tokens(1, length, seed=length) for length in (4, 1, 7)]
    alone = torch.cat([model(document) for document in documents], dim=1)
    alone.square().sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()

    # An empty document, and positions behind the last one, belong to no document.
    row = torch.cat([*documents, torch.zeros(1, 3, dtype=torch.long)], dim=1)
    cu_seqlens = torch.tensor([0, 4, 5, 5, 12], dtype=torch.int32)
    packed = model(row, cu_seqlens=cu_seqlens)[:, :12]
    packed.square().sum().backward()
    torch.testing.assert_close(packed, alone, **CLOSE)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-11)
    assert (packed - model(row)[:, :12]).abs().max() > 1e-3, "without boundaries it differs"


def deviations(**options) -> dict[str, float]:
    torch.manual_seed(0)
    model = GPT(vocab_size=500, width=128, num_layers=8, num_heads=4, **options)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert parameter.eq(0.0 if name.endswith("bias") else 1.0).all()
    return {
        name: float(parameter.detach().std())
        for name, parameter in model.named_parameters()
        if parameter.ndim > 1
    }


def test_fresh_weights_keep_the_variance_of_what_passes_or_have_the_deviations_of_gpt2():
    found = deviations()
    assert found["embedding.weight"] == pytest.approx(1.0, rel=0.05)
    assert found["head.weight"] == pytest.approx(128**-0.5, rel=0.05)
    assert found["blocks.3.attention.qkv.weight"] == pytest.approx(128**-0.5, rel=0.05)
    assert found["blocks.3.mlp.out.weight"] == pytest.approx((352 * 16) ** -0.5, rel=0.05)
    assert deviations(tied=True)["embedding.weight"] == pytest.approx(128**-0.5, rel=0.05)
    for name, std in deviations(bias=True, norm="layer", tied=True, init_std=0.02).items():
        expected = 0.02 / math.sqrt(16) if name.endswith("out.weight") else 0.02
        assert std == pytest.approx(expected, rel=0.05)


TORCHS_OWN = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")
"""What torch's own compiler warns of in what it does itself."""


@TORCHS_OWN
def test_packed_rows_of_every_kind_are_one_graph_with_the_gradients_of_documents_alone():
    model, graphs = make(TINY), []

    def counted(graph, inputs):
        graphs.append(graph)
        return graph.forward

    call = bind(torch.compile(model, backend=counted, fullgraph=True, dynamic=True))
    for lengths, fields in rows_with_filler():
        packed = call(fields)[0, : sum(lengths)]
        row = fields["input_ids"][:, : sum(lengths)]
        alone = torch.cat([model(each)[0] for each in row.split(lengths, dim=1)])
        torch.testing.assert_close(packed, alone, **CLOSE)
        found, expected = (
            torch.autograd.grad(logits.square().sum(), [*model.parameters()], allow_unused=True)
            for logits in (packed, alone)
        )
        for gradient, other in zip(found, expected, strict=True):
            torch.testing.assert_close(gradient, other, rtol=1e-12, atol=1e-11)
    assert len(graphs) == 1, "lengths, and how many documents there are, are dynamic"


def rows_with_filler():
    """Rows under a bounded set of lengths, whose filler is longer than a sample may be."""
    for lengths, time in (([4, 9, 7], 64), ([16, 2], 48), ([3, 3, 3, 5, 2], 80)):
        samples = [{"input_ids": tokens(length, seed=length)} for length in lengths]
        yield lengths, pack_samples(samples, {"input_ids"}, time, str)


@TORCHS_OWN
def test_the_kernel_for_packed_rows_is_traced_whole_as_the_installed_pytorch_takes_it():
    with torch.device("meta"):
        attention = Attention(16, 2, 0.0, bias=False).bfloat16()
        x, bounds = torch.empty(1, 12, 16, dtype=torch.bfloat16), torch.empty(4, dtype=torch.int32)
    documents = Documents(bounds, 12, 7, has_kernel=True)
    whole = torch.compile(attention, backend="eager", fullgraph=True, dynamic=True)
    assert whole(x, None, documents).shape == x.shape


def test_the_kernel_is_taken_where_a_gpu_has_it_and_never_on_a_cpu():
    asked = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "head_dim": 64, "dropout": 0}
    if not torch.cuda.is_available():
        assert has_varlen_kernel(**asked), "a plan for a GPU elsewhere"
    sizes = ({"head_dim": 12}, {"head_dim": 264}, {"dropout": 0.1})
    for other in ({"device": torch.device("cpu")}, {"dtype": torch.float32}, *sizes):
        assert not has_varlen_kernel(**asked | other)


def attended_and_gradients(given: list[Tensor], dtype: torch.dtype) -> Tensor:
    q, k, v = (x.detach().to(dtype, copy=True).requires_grad_() for x in given)
    attended = causal_attention(q, k, v, 0.0)
    attended.backward(given[0].to(dtype))
    return torch.stack([attended.detach(), q.grad, k.grad, v.grad]).double()


@pytest.mark.parametrize("time", [7, 2 * BLOCK + 3])
def test_attention_by_blocks_in_bf16_is_that_of_double_precision_within_a_64th(time):
    draws = torch.Generator().manual_seed(0)
    given = [torch.randn(2, time, 3, 8, generator=draws).bfloat16() for _ in range(3)]
    exact = attended_and_gradients(given, torch.float64)
    blocks = attended_and_gradients(given, torch.bfloat16)
    assert (blocks - exact).norm() < 2**-6 * exact.norm()


class Named(nn.Module):
    def forward(self, x, mask=None, *, scale=1.0):
        return x, mask, scale


def forwards(call):
    return type("Own", (nn.Module,), {"forward": call})()


def test_a_model_is_called_with_the_fields_its_forward_names_compiled_or_not():
    x, scale = torch.ones(1), torch.zeros(1)
    fields = {"x": x, "scale": scale, "ids": torch.zeros(1)}
    in_place = Named()
    in_place.compile(backend="eager")
    for model in (Named(), torch.compile(Named(), backend="eager"), in_place):
        assert bind(model)(fields) == (x, None, scale)
    everything = forwards(lambda _, **fields: sorted(fields))
    assert bind(everything)(fields) == ["ids", "scale", "x"]


class Flash(nn.Module):
    def forward(self, input_ids, position_ids=None, use_cache=True, **others):
        return {"use_cache": use_cache, **others}


def test_a_model_gets_the_boundaries_of_packed_documents_in_its_own_words():
    fields = pack_samples([{"input_ids": tokens(n)} for n in (2, 3)], {"input_ids"}, 8, str)
    bounds = fields["cu_seqlens"]
    named = forwards(lambda _, cu_seqlens, max_seqlen=None: (cu_seqlens, max_seqlen))
    assert bind(named)(fields) == (bounds, 3)
    theirs = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    theirs |= {"max_length_q": 3, "max_length_k": 3}
    brought = {**fields, "attention_mask": torch.ones(1, 8)}
    assert bind(Flash())(brought) == {"use_cache": False, **theirs}
    own = {"input_ids": tokens(1, 8), "cu_seqlens": bounds, "max_seqlen": torch.tensor(3)}
    assert bind(named)(own) == (bounds, own["max_seqlen"]), "of a `collate` of the data's own"
    assert bind(named)({"cu_seqlens": bounds}) == (bounds, None)


@pytest.mark.parametrize(
    ("module", "fault"),
    [
        (Named(), "forward of Named needs x, none of the fields .*tokens, labels; labels go"),
        (nn.Sequential(nn.Identity()), "^model: forward of Sequential needs input"),
        (forwards(lambda *given: given), "^model: forward of Own takes none of the fields"),
    ],
)
def test_a_required_parameter_without_a_field_is_named_with_the_fields_there_are(module, fault):
    with pytest.raises(ConfigError, match=fault):
        bind(module)({"tokens": torch.ones(1), "labels": torch.ones(1)})
