"""Sweeps: one run for each combination of values, or a search, over Hydra's launchers.

`train -m` is a flag of `conf/flags.yaml`. Read `sweep` first, then `jobs`.
"""
