"""Tell what happens in a run: files, screen, trackers. The only room with `.item()`.

`blocks` is what a person sees at once, `console` the screen and train.log. `metrics` writes
metrics.jsonl, `mirror` shows it to trackers, `views` shows runs that ended. Read `reporter` first.
"""
