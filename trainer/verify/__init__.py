"""Prove that a planned step is the whole-batch step, or name the modules that make it differ.

Both are computed in float64 on copies of the model (`case.py`) and compared tensor by tensor
(`comparison.py`); where they differ, `find_module.py` follows the first module whose output does.
What cannot be compared ends as `not_proven`, with its reason. Read `proof.py` first.
"""
