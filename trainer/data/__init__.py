"""Data sets, their index, and the loader that turns ids into collated fields.

A data set is any `Samples`; `DataView` is what the rest of the trainer sees of one. Read
`samples.py` and `view.py` first, then `loader.py` and `collate.py`; `documents.py` and `tokens.py`
hold what is built in.
"""
