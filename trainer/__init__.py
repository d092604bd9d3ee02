"""State the optimizer step; the trainer finds the cheapest way to compute exactly that step."""

__version__ = "0.1.0"
