"""State the optimizer step; the trainer finds the cheapest way to compute exactly that step."""

# Nothing is imported here: `-m` has the current folder first, until `__main__` takes it away.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from trainer.cli.python_api import train

__version__ = "0.1.0"
__all__ = ["train"]


def __getattr__(name: str) -> "Any":  # noqa: ANN401 - a module's attribute
    """Import what the package offers from Python when it is asked for.

    Raises:
        AttributeError: it offers no such thing.
    """
    if name == "train":
        from trainer.cli.python_api import train  # noqa: PLC0415

        return train
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
