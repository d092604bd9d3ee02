"""Predictions for data without labels, a line a record: `train predict`. Read `command` first."""
