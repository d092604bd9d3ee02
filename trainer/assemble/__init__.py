"""Build a run from its config: data, model, objective, optimizer, cut and sync policy.

`instantiate.py` alone turns a name in a config into a class. `build.py` makes a run in stages: its
data, its model (`model.py`), and the `Run` that has both. `run_plan.py` finds its cut,
`open_run.py` opens it, and `summary.py` describes it. Read `build.py` first.
"""
