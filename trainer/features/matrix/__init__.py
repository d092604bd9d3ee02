"""Compare the step under every way of execution: `train verify matrix=true`."""
