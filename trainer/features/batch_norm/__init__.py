"""BatchNorm: what its layers normalise over, and when running statistics move.

A mode is an option of `batchnorm`. Read `mode` first, then `modes`.
"""
