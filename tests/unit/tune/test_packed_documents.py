"""Hugging Face's models are packed, or called without a mask, where a trial shows that they may."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.lib.heads import TINY
from tests.lib.support import EXACT, VOCABULARY, WRONG, Bench, RaggedText, TinyLM, relative_error
from trainer.data.loader import Loader, Request
from trainer.features.heads.model_loss import ModelLoss
from trainer.features.hugging_face.by_document import attend_by_document
from trainer.models.bind import bind
from trainer.models.facts import facts_of
from trainer.objectives.base import Objective
from trainer.objectives.next_token import NextToken
from trainer.plan.cut import Layout
from trainer.plan.cuts import Budget, Fixed
from trainer.tune.packed_documents import needs_mask, packing_fault

CUT = Budget(max_tokens=80)
PACKED = {"packed": True, "max_shapes": 2}


def hugging_face(name: str, **values: Any) -> nn.Module:
    torch.default_generator.manual_seed(5)
    sizes = TINY | {"vocab_size": VOCABULARY, "attn_implementation": "sdpa"}
    config = getattr(transformers, f"{name}Config")(**sizes | values)
    heads = {"GPT2": "GPT2LMHeadModel", "Bert": "BertForMaskedLM"}
    model: nn.Module = getattr(transformers, heads.get(name, f"{name}ForCausalLM"))(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)  # so that every path matters to the output
    return model


class Recurrent(TinyLM):
    """Carries a state from one document into the next."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return super().forward(input_ids)


class Faint(Recurrent):
    """Lets a document see the one before it, by less than rounding would show."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return self.head(self.embed(input_ids)) + 1e-5 * super().forward(input_ids)


def fault(model: nn.Module) -> str | None:
    loader = Loader(RaggedText(), num_workers=0, seed=0)
    return packing_fault(loader, model, bind(model, autocast=torch.bfloat16))


def gradients(
    model: Callable[[], nn.Module], objective: Objective, cut: Any = CUT, **layout: Any
) -> Mapping[str, Tensor]:
    bench = Bench(cut, model=model, objective=objective, layout=Layout(**layout))
    return bench.gradient_and_loss()[0]


@pytest.mark.parametrize(("name", "objective"), [("GPT2", NextToken()), ("Llama", ModelLoss())])
def test_packed_gradients_are_those_of_padded_samples(name, objective):
    whole = gradients(lambda: hugging_face(name), objective, Fixed())
    packed = gradients(lambda: hugging_face(name), objective, **PACKED)
    assert relative_error(packed, whole) <= EXACT[torch.float64]


def test_gradients_of_a_model_that_mixes_documents_differ():
    whole = gradients(Recurrent, NextToken(), Fixed())
    assert relative_error(gradients(Recurrent, NextToken(), **PACKED), whole) > WRONG


class Scored(TorchFunctionMode):
    """Notes the most positions that one attention scores."""

    most = 0

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            self.most = max(self.most, args[0].shape[2])
        return func(*args, **(kwargs or {}))


def test_on_a_cpu_documents_are_attended_to_one_by_one_with_the_same_gradients():
    def by_document() -> nn.Module:
        model = hugging_face("Llama")
        assert attend_by_document(model)
        return model

    whole = gradients(lambda: hugging_face("Llama"), NextToken(), Fixed())
    with Scored() as masked:
        gradients(lambda: hugging_face("Llama"), NextToken(), **PACKED)
    with Scored() as alone:
        packed = gradients(by_document, NextToken(), **PACKED)
    assert relative_error(packed, whole) <= EXACT[torch.float64]
    assert alone.most <= RaggedText().lengths.max() < masked.most
    assert fault(by_document()) is None


def test_a_window_over_positions_is_left_to_the_mask_of_the_model():
    assert not attend_by_document(hugging_face("Mistral", sliding_window=8))
    assert not attend_by_document(hugging_face("Llama", attn_implementation="eager"))
    assert not attend_by_document(TinyLM())


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("Llama", torch.bfloat16), ("GraniteMoe", torch.float32)],  # the last names no use_cache
)
def test_a_model_that_heeds_positions_is_fit(name, dtype):
    model = hugging_face(name).to(dtype)
    assert fault(model) is None
    assert model.training


@pytest.mark.parametrize("make", [Recurrent, Faint])
def test_a_model_that_does_not_is_named(make):
    text = fault(make())
    assert text is not None
    kind = make.__name__
    assert text.startswith(f"{kind} does not hold packed documents apart: their logits are off by")
    assert "\n" not in text


class HostReads(TorchDispatchMode):
    """Counts values that the host waits for."""

    count = 0

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        self.count += func in {aten._local_scalar_dense.default, aten.is_nonzero.default}
        return func(*args, **(kwargs or {}))


class Masked(RaggedText):
    """Brings a mask of its own."""

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        sample = super().__getitem__(index)
        return {**sample, "attention_mask": torch.ones_like(sample["input_ids"])}


class Collated(RaggedText):
    """Pads itself, on the left."""

    def collate(self, samples: list[Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        ids = [sample["input_ids"] for sample in samples]
        ids = nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_side="left")
        return {"input_ids": ids, "labels": ids, "attention_mask": (ids > 0).long()}


def is_masked(model: nn.Module, data: Any = None) -> bool:
    loader = Loader(data or RaggedText(), num_workers=0, seed=0)
    call = bind(model, autocast=torch.bfloat16)
    return facts_of(model).omit_mask is None or needs_mask(loader, model, call)


def unmasked(name: str) -> nn.Module:
    model = hugging_face(name)
    (facts_of(model).omit_mask or pytest.fail)()
    return model


@pytest.mark.parametrize(("name", "dtype"), [("GPT2", torch.bfloat16), ("Llama", torch.float32)])
def test_a_causal_model_of_transformers_needs_no_mask(name, dtype):
    model = hugging_face(name).to(dtype)
    assert not is_masked(model)
    assert model.training
    assert is_masked(model, Masked())
    assert is_masked(model, Collated())


def faint() -> nn.Module:
    """Make a model whose attention adds less to its logits than bf16 may round."""
    return transformers.BertForMaskedLM(hugging_face("Bert").config).to(torch.bfloat16)


def balanced() -> nn.Module:
    return hugging_face("Mixtral", output_router_logits=True)


@pytest.mark.parametrize("make", [lambda: hugging_face("Bert"), faint, balanced, TinyLM])
def test_any_other_model_is_given_its_mask(make):
    assert is_masked(make())


def test_without_a_mask_gradients_are_the_same_and_the_host_reads_nothing():
    given = gradients(lambda: hugging_face("GPT2"), NextToken())
    found = gradients(lambda: unmasked("GPT2"), NextToken())
    assert relative_error(found, given) <= EXACT[torch.float64]
    fields = Loader(RaggedText(), num_workers=0, seed=0).load(Request((0, 1, 2), 0, 24))
    for model, is_given in ((hugging_face("GPT2"), True), (unmasked("GPT2"), False)):
        names = list[str]()
        model.register_forward_pre_hook(
            lambda _, __, kwargs, names=names: names.extend(kwargs), with_kwargs=True
        )
        with HostReads() as counter:
            bind(model)(fields)
        assert ("attention_mask" in names) == (counter.count > 0) == is_given
        assert ("use_cache" in names) == is_given, "without either it would be read, too"


def test_gradients_of_bert_without_its_mask_differ():
    objective = ModelLoss(reduction="mean", causal=False)
    given = gradients(lambda: hugging_face("Bert"), objective)
    found = gradients(lambda: unmasked("Bert"), objective)
    assert relative_error(found, given) > WRONG
