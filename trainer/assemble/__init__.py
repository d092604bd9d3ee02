"""Build a run from its config: data, model, objective, optimizer, cut and sync policy.

`instantiate.py` alone turns a name in a config into a class. `build.py` makes a run in stages: its
data (`data_sets.py`), its model (`model.py`), and the `Run` that has both. `run_plan.py` finds its
cut, `summary.py` describes it, and `open_run.py` opens it; what it goes on with is of `saved.py`.
Read `build.py` first.
"""
