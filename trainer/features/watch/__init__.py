"""Odd steps: spikes of loss and gradient norm, and a loss that does not fall. Read `early`."""
