"""Every test computes on one thread, takes its time and keeps its caches to itself."""

import gc
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, is_hypothesis_test, settings

from tests.lib.ranks_support import Ranks

torch.set_num_threads(1)
# Else a first backward on fake tensors begins threads in CUDA builds, and forks could run none.
torch.zeros((), requires_grad=True).backward()
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that tests start
# Else each of them compiles the package again, for 0.4 s.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
if "PYTEST_XDIST_WORKER" in os.environ:
    import torch._dynamo  # as the first optimizer does

# How long an example takes depends on what else the machine does.
ANY_MACHINE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("default run", ANY_MACHINE, max_examples=30)
settings.register_profile("nightly", ANY_MACHINE, max_examples=300)
settings.load_profile("default run")


def pytest_configure(config: pytest.Config) -> None:
    """Draw more examples of every property, nightly; what of a slow test is nightly is not slow."""
    if config.option.markexpr == "nightly":
        settings.load_profile("nightly")
    elif config.option.markexpr == "slow":
        config.option.markexpr = "slow and not nightly"


MANY = 100_000  # objects of Python: a collection walks them in some hundredths of a second


def pytest_runtest_setup() -> None:
    """Freeze what is imported, which every step that runs out of memory would walk else.

    Hydra closes all handlers of logs, and that of absl closes its stream, which is pytest's own.
    """
    if absl_log := sys.modules.get("absl.logging"):
        absl_log.get_absl_handler().python_handler.stream = sys.__stderr__
    if len(gc.get_objects()) > MANY:
        gc.collect()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the file that takes longest, so that nobody waits for it at the end."""
    items.sort(key=lambda item: item.path.name != "test_docs.py")
    if config.option.markexpr == "nightly":
        for item in items:
            if is_hypothesis_test(getattr(item, "obj", None)):
                item.add_marker("nightly")


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stand in an empty folder, as whoever types a command does; modules of it go with it."""
    monkeypatch.chdir(tmp_path)
    yield
    for name, module in [*sys.modules.items()]:
        if str(getattr(module, "__file__", None) or "").startswith(f"{tmp_path}{os.sep}"):
            del sys.modules[name]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep the indexes of a test in a folder of its own, which is not there yet."""
    monkeypatch.setenv("TRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def no_graphs() -> Iterator[None]:
    """Begin and end without anything compiled, and count from zero."""
    from torch import _dynamo  # noqa: PLC0415 - a second
    from torch._dynamo.utils import counters  # noqa: PLC0415

    _dynamo.reset()
    counters.clear()
    with warnings.catch_warnings():
        # torch's own compiler warns about what it does itself, and hides it from users.
        warnings.simplefilter("ignore")
        yield
    _dynamo.reset()


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Processes for ranks; DTensor remembers process groups, so each module has its own."""
    with closing(Ranks()) as group:
        yield group


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        # All workers read one index of the standard library's source; the first one builds it.
        shared = tmp_path_factory.getbasetemp()
        shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
        patch.setenv("TRAIN_CACHE", str(shared / "cache"))
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield
