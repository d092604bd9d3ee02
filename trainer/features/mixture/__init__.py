"""Samples of several data sets by weight. Read `mixture`."""
