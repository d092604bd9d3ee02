"""From a name in a config to an object: trusted, of the right kind, with arguments that exist."""

import pytest
from torch import nn

from tests.lib.run_toys import Net
from trainer.assemble.instantiate import construct
from trainer.config.components import Component
from trainer.core.errors import ConfigError

MINE = "tests.lib.run_toys.Net"


def make_net(width: int = 8) -> nn.Module:
    """A factory."""
    return Net(width)


class Sized:
    def __init__(self, size: int, vocab_size: int = 3) -> None:
        self.size, self.vocab_size = size, vocab_size


@pytest.mark.parametrize("target", [MINE, f"{__name__}.make_net", f"{MINE}.of"])
def test_a_class_or_a_factory_of_ones_own_is_typed_or_its_package_trusted(target):
    named, package = Component(target=target), target.partition(".")[0]
    assert isinstance(construct(named, "model", nn.Module, (package,)), Net)
    with pytest.raises(ConfigError, match="comes from a recipe or a saved run"):
        construct(named, "model", nn.Module, ("torch",))
    typed = Component(target=target, typed_target=True)
    assert isinstance(construct(typed, "model", nn.Module), Net)


def test_values_from_elsewhere_fill_what_is_left_out_and_no_more():
    def vocabulary(given: dict[str, object], **params: object) -> int:
        named = Component(target=f"{__name__}.Sized", params=params, typed_target=True)
        return construct(named, "data", Sized, (), {"size": 2, **given}).vocab_size

    assert vocabulary({"vocab_size": 7, "unheard": 1}) == 7
    assert vocabulary({"vocab_size": 7}, vocab_size=5) == 5
    assert vocabulary({"vocab_size": 7}, vocab_size=None) == 7
    assert vocabulary({"vocab_size": None}) == 3, "nothing known leaves the default"


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
        construct(Component(target="wraps.Net", typed_target=True), "model", nn.Module)
