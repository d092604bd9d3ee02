"""Traces of a few steps, by PyTorch's profiler. Read `tracing`."""
