"""Train: the loop over steps, the step, its batches, evaluation and saving.

Read `loop.py` first, then `step.py`.
"""
