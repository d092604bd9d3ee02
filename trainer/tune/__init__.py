"""Find what fits into memory and what is fast: memory by fake runs, time by a few real ones.

`predict.py` knows the peak of a micro-batch of any shape, `speed.py` its time, and `tuner.py`
chooses the fastest that fits. Facts about a model are remembered between runs (`cache.py`). Read
`tuner.py` first.
"""
