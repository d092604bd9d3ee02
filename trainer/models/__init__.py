"""Provide the built-in models, and what the trainer asks of any model, in plain PyTorch.

`gpt.py` is the model of `model=gpt_tiny`, `gpt_small` and `gpt2`. `bind.py` calls a model with the
fields that its `forward` names, `recompute.py` finds the blocks that activation checkpointing and
FSDP2 work on, and `first_weights.py` builds a model in shards. Read `gpt.py` first.
"""
