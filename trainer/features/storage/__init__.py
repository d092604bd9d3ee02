"""Storage: runs and data by URL, through fsspec.

The rest of the program works on copies on this machine, whose place `trainer/core/urls.py` says.
`conf/libraries.yaml` names the two functions that it calls. Read `sending` first, then `copies`.
"""
