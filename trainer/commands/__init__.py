"""Run each command of `train`.

All take the run's config, composed and checked; the run folder, locked by this process where they
write into it; all ranks; and `stop`, which says whether a signal asked to stop, and which those
that take seconds do not ask. They give the exit code.
"""
