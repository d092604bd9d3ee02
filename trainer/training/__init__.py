"""Train: the loop over steps, the step, its batches, evaluation and saving.

`loop.py` decides when to step, evaluate, save and stop; `step.py` turns one global batch into one
update: gather, compute, agree, reduce, clip, update. The phases of a step are in `window.py`, and
`batches.py` loads global batches ahead. `data.py` and `model.py` are what all of them are given.
Read `loop.py` first, then `step.py`.
"""
