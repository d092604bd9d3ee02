"""Start the ranks of a run, here or under torchrun or srun, and watch them.

Read `start.py` first.
"""
