"""Place parameters and reduce gradients: whole copies, FSDP2 shards, or in a fixed order.

`base.py` says what a placement does in a step and is the one of whole copies; `fsdp.py` shards,
`deterministic.py` sums in an order that no number of ranks changes. A sync policy (`sync.py`) says
when gradients are reduced. Read `base.py` first.
"""
