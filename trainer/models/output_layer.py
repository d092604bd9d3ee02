"""Run a model up to its output layer, so that a loss need not hold the logits of all positions.

Works where the logits are the output layer's and nothing else: not where they are scaled or capped
on their way out, as in Cohere, Granite and Gemma 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from trainer.core.micro_batch import output_part

_OUTPUT = "output_matrices"
"""Attribute of a layer: names of its own matrices that give the output, as a trial found."""
_UNMULTIPLIED = "unmultiplied_matrices"
"""Attribute of a layer: names of its own matrices that are no factor of a product there."""
_NO_PRODUCTS = (
    *("AddBackward", "SubBackward", "MulBackward", "DivBackward", "CatBackward", "WhereBackward"),
    *("EmbeddingBackward", "IndexBackward", "IndexSelectBackward"),
    *("NativeLayerNormBackward", "FusedRmsNormBackward"),
)
"""Begin the names of operations of autograd that multiply no matrices."""
IS_LAST = "gives_logits"
"""Attribute of an output layer whose outputs are the logits of its model, as a trial found."""


def declares_logits(module: nn.Module) -> bool:
    """Whether a module, not yet laid out in shards, says that its layer's outputs are its logits.

    Its class does, by `logits_from_output_layer = True` beside the `forward` of which it is true: a
    class derived from it with another `forward` does not.
    """
    forward = getattr(module.forward, "__func__", None)
    for own in map(vars, type(module).__mro__):
        if own.get("forward") is forward and own.get("logits_from_output_layer") is True:
            return not module._forward_hooks
    return False


def declared_output(module: nn.Module) -> nn.Module | None:
    """Give the layer that a model names by `get_output_embeddings`, as Hugging Face's do."""
    try:
        layer = module.get_output_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return None
    # Models whose head gives no words return None.
    return layer if isinstance(layer, nn.Module) else None


def note_output_matrices(module: nn.Module, losses: Iterable[Tensor]) -> None:
    """Note on layers which of their matrices a loss depends on through no other matrix.

    Of two that both do, one through which the other acts as well, as beside a residual, is hidden.
    """
    # By whether another matrix lies between a matrix and the loss
    by_place: dict[bool, set[int]] = {False: set(), True: set()}
    by_product: dict[bool, set[int]] = {False: set(), True: set()}
    seen, todo = set[tuple[Any, bool]](), [(loss.grad_fn, False) for loss in losses]
    while todo:
        node, is_behind = step = todo.pop()
        if node is None or step in seen:
            continue
        seen.add(step)
        others, found = list[Any](), by_place[is_behind]
        has_matrix = False
        for operand, _ in node.next_functions:
            weight = _variable(operand)
            # A bias, or the gain of a norm, is no matrix: what lies behind it is as near to the
            # loss.
            if weight is None or weight.ndim <= 1:
                others.append(operand)
            else:
                found.add(id(weight))
                by_product[not node.name().startswith(_NO_PRODUCTS)].add(id(weight))
                has_matrix = True
        todo += [(operand, is_behind or has_matrix) for operand in others]
    last, tables = by_place[False] - by_place[True], by_product[False] - by_product[True]
    for part in module.modules():
        own = dict(part.named_parameters(recurse=False))
        setattr(part, _OUTPUT, [name for name in own if id(own[name]) in last])
        setattr(part, _UNMULTIPLIED, [name for name in own if id(own[name]) in tables])


def _variable(node: Any) -> Tensor | None:  # noqa: ANN401 - of autograd's graph
    """Give the parameter that is an operand as it is, or transposed or cast."""
    while node is not None and len(node.next_functions) == 1:
        if node.name().startswith(_NO_PRODUCTS):
            return None
        node = node.next_functions[0][0]
    return getattr(node, "variable", None)


def output_matrices(module: nn.Module) -> list[Tensor]:
    """Give the matrices of the output layer, as the model names it, or as `note_...` found it."""
    if (layer := declared_output(module)) is not None:
        return [*layer.parameters()]
    return _noted(module, _OUTPUT)


def unmultiplied(module: nn.Module) -> list[Tensor]:
    """Give the matrices that are looked up or added, as `note_...` found; another kind of table."""
    return _noted(module, _UNMULTIPLIED)


def _noted(module: nn.Module, kind: str) -> list[Tensor]:
    found = list[Tensor]()
    for part in module.modules():
        found += map(part.get_parameter, vars(part).get(kind, ()))
    return found


def candidate(module: nn.Module) -> nn.Module | None:
    """Find the output layer, where it is a plain matrix that nobody hooks onto.

    A layer that is no `nn.Linear` says by `is_matrix_product` that it gives `x @ weight.T + bias`.
    """
    if (layer := declared_output(module)) is None:
        return None
    if "forward" in vars(layer) or layer._forward_hooks or layer._forward_pre_hooks:
        return None
    is_plain = type(layer).forward is nn.Linear.forward
    return layer if is_plain or vars(type(layer)).get("is_matrix_product") else None


def watch_last(model: nn.Module, layer: nn.Module) -> Callable[[], bool]:
    """Watch a copy of a model, and tell whether its logits were the very tensor of a layer."""
    # Each tensor, so that its id stays its own, with its version: later where it was written into
    seen: dict[nn.Module, list[tuple[int, int, object]]] = {layer: [], model: []}

    def note(part: nn.Module, _: object, output: Any) -> None:  # noqa: ANN401
        logits = output if isinstance(output, Tensor) else output_part(output, "logits")
        seen[part].append((id(logits), getattr(logits, "_version", -1), logits))

    layer.register_forward_hook(note)
    model.register_forward_hook(note)
    return lambda: [each[:2] for each in seen[layer]] == [each[:2] for each in seen[model]] != []
