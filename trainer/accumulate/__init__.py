"""Gradient strategies: how the gradients of micro-batches become the step's gradient."""
