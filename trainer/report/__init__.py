"""Tell what happens in a run: files, screen, trackers. The only room with `.item()`.

`records` is what happened, `blocks` what a person sees of it at once, `console` the screen and
train.log; `metrics` writes metrics.jsonl, `mirror` shows it to `trackers`. Read `reporter` first.
"""
