"""Turn a command line into a checked job and start it.

`argv.py` splits it, `compose.py` lets Hydra compose it and checks it, `prepare.py` finds the run it
names, `start.py` launches it. Read `main.py` first.
"""
