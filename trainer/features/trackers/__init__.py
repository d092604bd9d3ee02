"""Show a run elsewhere: one file for each tracker, beside one option in `conf/trackers/`.

Each derives from `Tracker` in `report/tracker.py`, and is called from the thread of
`report/mirror.py` alone. Read `tensorboard` first.
"""
