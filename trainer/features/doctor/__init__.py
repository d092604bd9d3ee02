"""What this machine is, and how well runs on it were predicted. Read `doctor` first."""
