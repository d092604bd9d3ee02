"""Train the heads of a model: objectives beside classes, and tokens from those before them.

Each is one file and one option of `objective`. Read `numbers` first.
"""
