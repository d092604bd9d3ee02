"""Arguments of a class are read from its source, ours or a user's, and nothing is imported."""

import sys
from typing import get_args

import pytest

from trainer.config import components
from trainer.config.declared import declared

OWN = """
import no_such_module
from trainer.config import components
from trainer.config.components import FREE, Count as N, NonNegative, Share
from trainer.optim.schedules import Schedule

class Base:
    def __init__(self, width: N, num_heads: N = 1, rate: Share | None = None, kind: "x" = 0,
                 positions: str = "rotary", *, mode: Literal["a", "b"] = "a") -> None: ...

class Net(Base): ...

class Slow(Schedule):
    floor: components.Share = 0.0
    price: Annotated[NonNegative | None, "euros", FREE] = None

def make(width: N, other=None): ...
"""


@pytest.mark.usefixtures("own_folder")
def test_a_class_of_one_s_own_declares_its_arguments_as_ours_do(tmp_path):
    (tmp_path / "my_net_of_tests.py").write_text(OWN)
    found = declared("my_net_of_tests.Net").types
    assert found["width"] is components.Count
    assert found["rate"] == components.Share | None
    assert "kind" not in found, "of a type that is not known"
    assert {"mode", "positions"} <= found.keys()
    slow = declared("my_net_of_tests.Slow")
    assert slow.types["floor"] is components.Share, "by its module"
    price = slow.types["price"]
    assert components.FREE in get_args(price), "a run that goes on may change it"
    assert components.fits(price, None)
    assert not components.fits(price, -1)
    assert "warmup" in slow.types
    assert "my_net_of_tests" not in sys.modules
    assert declared("my_net_of_tests.make").types == {"width": components.Count}
    assert not {**declared("my_net_of_tests.missing").types, **declared("torch.nn.Linear").types}
