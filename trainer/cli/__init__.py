"""Turn a command line into checked jobs and start them. The only `hydra.main` is in `main.py`.

Read `main.py` first.
"""
