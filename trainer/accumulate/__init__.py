"""Turn the gradients of micro-batches into the step's gradient. Read `sum.py` first."""
