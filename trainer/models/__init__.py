"""Models in plain PyTorch."""
