"""Place parameters and reduce gradients: whole copies, FSDP2 shards, or in a fixed order.

A sync policy (`sync.py`) says when gradients are reduced. Read `base.py` first.
"""
