"""Norms of weights, gradients and updates, block by block. Read `norms`."""
