"""Prove that a planned step is the whole-batch step, or name the modules that make it differ.

Read `proof.py` first.
"""
