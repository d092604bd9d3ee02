"""Build a run from its config: data, model, objective, optimizer, cut and sync policy.

Only `instantiate.py` turns a name in a config into a class. Read `parts.py` first.
"""
