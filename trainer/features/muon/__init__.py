"""The optimizer Muon, whose updates are orthogonal matrices. Read `muon` first."""
