"""The README.md beside exported weights, as hubs show it. Read `card`."""
