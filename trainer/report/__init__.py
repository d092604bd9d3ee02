"""What a run tells the world: metrics, console, W&B. The only place with `.item()`.

`records` say what happened, `figures` how a number reads, `blocks` what a person sees at once,
`console` puts it on the screen and into train.log, `metrics` writes the truth (metrics.jsonl),
`wandb` mirrors it, and `reporter` is the one face that the training loop knows.
"""
