"""From a name in a config to an object: trusted, of the right kind, with arguments that exist."""

from typing import Any

import pytest
from torch import nn

from tests.lib.run_toys import Net
from trainer.assemble.instantiate import construct
from trainer.config.components import Component
from trainer.core.errors import ConfigError

MINE = "tests.lib.run_toys.Net"


def component(target: str, *, typed: bool = False, **params: object) -> Component:
    return Component(target=target, params=params, typed_target=typed)


def make_net(width: int = 8) -> nn.Module:
    """A factory."""
    return Net(width)


class Sized:
    def __init__(self, size: int, vocab_size: int = 3, *more: int) -> None:
        self.size, self.vocab_size = size, vocab_size


class Open:
    def __init__(self, **anything: int) -> None:
        self.anything = anything


HERE = f"{__name__}.Sized"


def test_a_hugging_face_model_is_described_by_the_settings_of_its_config():
    small = {"n_layer": 1, "n_head": 2, "n_embd": 8, "n_positions": 16}
    described = component("transformers.GPT2LMHeadModel", **small)
    model = construct(described, "model", nn.Module, (), {"vocab_size": 11})
    assert (model.config.n_embd, model.config.vocab_size) == (8, 11)
    foreign = component("transformers.GPT2LMHeadModel", attn_implementation="evil/kernel")
    with pytest.raises(ConfigError, match=r"model\.attn_implementation"):
        construct(foreign, "model", nn.Module)


@pytest.mark.parametrize("target", [MINE, f"{__name__}.make_net", f"{MINE}.of"])
def test_a_class_or_a_factory_of_ones_own_is_typed_or_its_package_trusted(target):
    assert isinstance(construct(component(target, typed=True), "model", nn.Module), Net)
    package = target.partition(".")[0]
    assert isinstance(construct(component(target), "model", nn.Module, (package,)), Net)
    with pytest.raises(ConfigError, match="comes from a recipe or a saved run"):
        construct(component(target), "model", nn.Module, ("torch",))


def test_what_an_argument_names_is_built_too():
    inner = {"_target_": "tests.lib.run_toys.Net.of", "width": 4}
    norm = {"_target_": "torch.nn.LayerNorm", "_partial_": True, "eps": 0.5}
    built = construct(
        component(f"{__name__}.Open", typed=True, net=inner, norm=norm, nets=[inner, 1]),
        "data",
        Open,
    )
    made: Any = built.anything
    assert made["net"].embed.embedding_dim == made["nets"][0].embed.embedding_dim == 4
    assert made["norm"].func is nn.LayerNorm, "who takes it sees a class, and may build it"
    assert made["norm"](3).eps == 0.5
    assert made["nets"][1] == 1


def test_values_from_elsewhere_fill_what_is_left_out_and_no_more():
    def built(given: dict[str, object], **params: object) -> Sized:
        return construct(component(HERE, typed=True, size=2, **params), "data", Sized, (), given)

    assert built({"vocab_size": 7, "unheard": 1}).vocab_size == 7
    assert built({"vocab_size": 7}, vocab_size=5).vocab_size == 5
    assert built({"vocab_size": 7}, vocab_size=None).vocab_size == 7
    assert built({"vocab_size": None}).vocab_size == 3, "nothing known leaves the default"


def test_a_class_that_cannot_be_imported_names_the_error_behind_it(tmp_path, monkeypatch):
    """As transformers does where torchvision was built for another torch."""
    (tmp_path / "torchvision-0.0.1.dist-info").mkdir()
    found = "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.0.1\n"
    (tmp_path / "torchvision-0.0.1.dist-info" / "METADATA").write_text(found)
    (tmp_path / "wraps.py").write_text(
        "try:\n    raise RuntimeError('operator torchvision::nms does not exist')\n"
        "except RuntimeError as error:\n    raise ImportError('Could not import') from error\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    pair = r"torchvision 0\.0\.1 does not fit torch \d"
    with pytest.raises(ConfigError, match=rf"Could not import \(operator .*exist\); {pair}"):
        construct(component("wraps.Net", typed=True), "model", nn.Module)
