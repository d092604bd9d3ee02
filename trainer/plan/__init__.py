"""Decide, as pure functions over numbers, which samples a step takes and how they are cut.

`order.py` gives the ids of every step, `cut.py` what a plan is, `cuts.py` the cuts of `accum=`;
`partition.py` and `packing.py` do their arithmetic. Nothing here imports torch or a model: the same
numbers give the same plan on every rank. Read `cut.py` first.
"""
