"""Goldens: what some eighty command lines do, recorded before a change and compared after it."""
