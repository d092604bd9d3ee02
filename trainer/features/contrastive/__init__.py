"""Contrastive learning: embeddings of a sample are compared with those of all others of the step.

`text_pairs` makes embeddings of two texts by one encoder. Read `contrastive` first.
"""
