"""How large a global batch pays, and sizes that change in a run. Read `measure` first."""
