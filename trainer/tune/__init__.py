"""Finds what fits and what is fast: memory by fake runs, time by a few real ones."""
