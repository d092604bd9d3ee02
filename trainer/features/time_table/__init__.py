"""Where the time of steps went, and the setting that shortens a long part. Read `table`."""
