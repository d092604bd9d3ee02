"""Data sets, their index, and the loader that turns ids into collated fields."""
