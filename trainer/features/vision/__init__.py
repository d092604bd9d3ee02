"""Train on images: what reads and augments them, and two models that take them.

`images` reads a folder with a folder for each class, `pixels` makes what a model takes. Read
`images` first.
"""
