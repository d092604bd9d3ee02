"""Runs: `train ls` lists those below `outputs`, `train rm` removes some.

Both are commands of `conf/commands.yaml`; nothing here imports torch. Read `ls` first.
"""
