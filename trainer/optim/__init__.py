"""Define the built-in optimizers and learning rate schedules.

`optimizers.py` builds PyTorch's own in parameter groups; a class of `torch.optim` or of the user's
own does as well. A schedule is a pure function of the step. Read `optimizers.py` first.
"""
