"""Define the config of a run: its keys, their types and ranges, and the rules between them.

Nothing here imports torch; defaults and docs stand in `conf/`. Read `run_config.py` first.
"""
