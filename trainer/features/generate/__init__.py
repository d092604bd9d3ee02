"""Texts that a model writes: prompts that are continued at every evaluation. Read `prompts`."""
