"""Find what fits and what is fast: memory by fake runs, time by a few real ones.

Facts about a model are remembered between runs. Read `tuner.py` first.
"""
