"""What a run tells the world: metrics, console, W&B. The only place with `.item()`."""
