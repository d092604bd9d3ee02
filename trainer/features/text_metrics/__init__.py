"""Metrics of what a model predicts as a whole: of entities, and of texts. Read `metrics`."""
