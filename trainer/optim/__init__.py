"""Define the built-in optimizers and learning rate schedules. Read `optimizers.py` first."""
