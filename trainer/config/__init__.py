"""Define the config of a run: its keys, their types and ranges, and the rules between them.

Nothing here imports torch. Read `sections.py` first.
"""
