"""Hold what every room may use: ranks, errors, signals, durable writes, micro-batches.

Imports nothing of the trainer. Read `errors.py` first.
"""
