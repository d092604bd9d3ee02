"""Durable writes, and the state of a run in and out of safetensors."""
