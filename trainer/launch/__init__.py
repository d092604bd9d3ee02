"""Start the ranks of a run, here or under torchrun or srun, and watch them.

Whatever starts it, a rank is a process of its own with a light supervisor beside it, which outlives
it and says in one line why it ended. Read `start.py`, then `supervise.py`.
"""
