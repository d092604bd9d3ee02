"""Learn from pairs of answers of which one is preferred: policies (DPO, ORPO) and reward models.

Samples are of two rows, the chosen answer and the rejected one. Read `policies` first.
"""
