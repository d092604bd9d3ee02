"""How a run starts on several hosts, printed for this one and the others. Read `lines` first."""
