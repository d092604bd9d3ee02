"""Define the config of a run: its keys, their types and ranges, and the rules between them.

Defaults and docs stand in `conf/`; help, errors and checks are derived from both. `recipes.py`
reads what strangers wrote, `consent.py` says what of it needs its user's word, and `validate.py`
turns what Hydra composed into a `RunConfig`. Nothing here imports torch. Read `run_config.py`.
"""
