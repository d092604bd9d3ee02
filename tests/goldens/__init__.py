"""Goldens: what some sixty command lines do, recorded before a change and compared after it."""
