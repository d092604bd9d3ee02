"""Pure functions over numbers: the order of samples, batch arithmetic, cuts, costs."""
