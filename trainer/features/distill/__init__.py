"""Train a model on the outputs of another one: the objective, and how its teacher is loaded."""
