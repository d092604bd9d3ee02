"""Turn a command line into checked jobs and start them.

The only `hydra.main` is in `hydra_main.py`. Read `main.py` first, then `prepare.py`.
"""
