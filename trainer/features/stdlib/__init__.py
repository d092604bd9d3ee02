"""Text that every machine has: the source of Python's standard library. Read `stdlib`."""
