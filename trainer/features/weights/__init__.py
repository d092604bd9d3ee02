"""Weights of classes by the data, and a check that weights are read. Read `feature`."""
