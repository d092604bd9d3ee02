"""Build a run from its config: data, model, objective, optimizer, cut and sync policy.

Only `instantiate.py` turns a name in a config into a class, and `parts.py` makes every part of a
run. `checks.py` refuses what does not belong together, and `prepare.py` chooses the cut and the
sync policy, tuned where they are not typed. Read `parts.py` first.
"""
