"""Turn the micro-batches of a step into the gradient of the whole global batch.

A gradient strategy (`base.py`) owns the loop over micro-batches, and says what its sums are divided
by; `sum.py` is the one built in. `model_state.py` and `rollback.py` undo what forwards wrote into
the model, where a step is repeated or skipped. Read `sum.py` first.
"""
