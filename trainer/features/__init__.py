"""What a run may have beside the engine, which knows none of it by name.

Each lives in one folder: its code, a README of ten lines, its tests in `tests/features/`; its YAML
stands in `conf/`, which names it. A feature imports the engine, and no other feature.
"""
