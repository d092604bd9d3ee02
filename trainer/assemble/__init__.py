"""Build a run from its config: data, model, objective, optimizer, cut and sync policy.

`instantiate.py` alone turns a name in a config into a class. `build.py` makes every part of a
run, `run_plan.py` finds its cut, and `run.py` opens it, with what `saved.py` read of a checkpoint.
`summary.py` describes it. Read `build.py` first, from `assemble` on.
"""
