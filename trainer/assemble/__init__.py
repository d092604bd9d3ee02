"""Build a run from its config: data, model, objective, optimizer, cut and sync policy.

Only `instantiate.py` turns a name in a config into a class, and `components.py` makes every part of
a run. `checks.py` refuses what does not belong together, `run_plan.py` finds the cut, tuned where
it is not typed, and `run.py` opens a run that is planned. Read `components.py` first.
"""
