"""Hold what every room may use: ranks, errors, signals, durable writes, micro-batches.

`world.py` is this process's view of all ranks, `durable.py` writes files that survive a power loss,
`run_folder.py` names what is in a run's folder, and `errors.py` lists every error that a user can
cause, with its exit code. Imports nothing else of the trainer. Read `errors.py` first, then
`world.py`.
"""
