"""What layers normalise over the samples of a step, and when their running statistics move.

A mode is an option of `conf/`. Read `mode` first, then `modes`.
"""
