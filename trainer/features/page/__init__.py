"""The page of a run, or of several: one HTML file with curves, plan, memory, time and config.

`conf/views.yaml` names its function; nothing here imports torch. Read `page` first.
"""
