"""Turn a model's outputs into named loss sums, and count the weights they are divided by.

`base.py` holds `Objective`, the class to subclass. An objective never divides: one place does, by
the weight of the whole global batch over all ranks. Read `base.py` first, then `next_token.py`.
"""
