"""Continue the prompts of `log.generate` at evaluations, to show what a model has learnt."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Self, final

from trainer.assemble.features import Feature
from trainer.assemble.run import Run
from trainer.config.run_config import RunConfig
from trainer.core.errors import ConfigError, Preempted
from trainer.core.out_of_memory import AllocationGuard
from trainer.core.run_folder import RunFolder
from trainer.data.samples import faults_of
from trainer.features.generate.next_token import Tokens, scores_behind
from trainer.report.console import step_text
from trainer.training.data import Data
from trainer.training.evaluation import inference
from trainer.training.loop import OpenRun


@final
@dataclass(frozen=True)
class ContinuedPrompts(Feature):
    """Shows what a model writes behind some texts."""

    texts: Sequence[str]
    most: int  # tokens that follow

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """See the base class."""
        return cls(config.log.generate, config.log.generate_tokens)

    def check(self, run: Run) -> None:
        """Refuse a model or data that cannot continue text, and a prompt that leaves no room."""
        if not self.texts or run.config.command not in {"train", "plan"}:
            return
        data, objective, fault = run.data.train, run.model.objective, None
        if not objective.predicts_next:
            fault = f"objective={type(objective).__name__} predicts no next token; leave it out"
        elif None in (data.facts.prompt, data.facts.decode):
            text = "has no `prompt` and `decode`, which turn text into tokens and back"
            fault = f"{data.kind} {text}"
        elif not run.data.held_out:
            fault = "nothing is held out, so nothing is evaluated: type data.holdout=0.05"
        if fault is not None:
            raise ConfigError(f"log.generate: {fault}")
        prompts, _, limit = self._encoded(run.data)
        for text, tokens in zip(self.texts, prompts, strict=True):
            if not 0 < len(tokens) < limit:
                raise ConfigError(
                    f"log.generate: {text!r:.40} has {len(tokens)} tokens; 1 to {limit - 1} leave "
                    "room for one that follows"
                )

    def after_evaluation(self, run: OpenRun) -> None:
        """See the base class: the first rank shows what it is that follows each prompt."""
        if not self.texts:
            return
        prompts, ends, limit = self._encoded(run.feed.data)
        length = min(max(map(len, prompts)) + self.most, limit)
        rows = _continued(run, prompts, ends, length, self.most)
        if rows is None:
            text = "out of memory; nothing was continued, and the run goes on"
            run.reporter.warn(f"log.generate: {text}")
        elif run.context.world.is_main:
            self._show(run, prompts, rows)

    def _encoded(self, data: Data) -> tuple[list[Tokens], set[int], int]:
        """Give the tokens of each prompt, those that end what follows, and the most of a row."""
        view, prompts, ends = data.train, list[Tokens](), set[int]()
        encode = view.facts.prompt
        with faults_of(f"`prompt` of {view.kind}"):
            assert encode is not None  # see `check`
            for text in self.texts:
                tokens, last = encode(text)
                prompts.append([int(token) for token in tokens])
                ends.update(last)
        # Positions beyond those of the data have not been learned, or are none of the model's.
        return prompts, ends, int(view.facts.max_length or data.lengths.max())

    def _show(self, run: OpenRun, prompts: Sequence[Tokens], rows: Sequence[Tokens]) -> None:
        """Decode what follows each prompt, onto the screen and into generated.jsonl."""
        step, decode = run.progress.step, run.feed.data.loader.dataset.facts.decode
        found = list[str]()
        assert decode is not None  # see `check`
        try:
            # Of the whole: what stands alone may be decoded without the space before it.
            for tokens, row in zip(prompts, rows, strict=True):
                found.append(decode(row)[len(decode(tokens)) :])
        except Exception as error:  # `decode` is the user's, and the run goes on without
            why = f"{type(error).__name__}: {error}"
            run.reporter.warn(f"log.generate: what follows cannot be decoded: {why}")
            return
        for prompt, text in zip(self.texts, found, strict=True):
            run.reporter.record(RunFolder.TEXTS, {"step": step, "prompt": prompt, "text": text})
            at = step_text(step, run.total_steps)
            run.reporter.line(f"{at}  {prompt!r} -> {text!r}")


def _continued(
    run: OpenRun, prompts: Sequence[Tokens], ends: Collection[int], length: int, most: int
) -> list[Tokens] | None:
    """Append the likeliest tokens to each prompt, the same on all ranks. Collective.

    Each token costs a forward of all prompts, padded on the right to one length, so that a compiled
    or sharded model runs as it does in training; nothing is cached between two. None where memory
    ran out.
    """
    world, model = run.context.world, run.context.parallel
    rows, is_open = [list(prompt) for prompt in prompts], [True] * len(prompts)
    model.gather()
    try:
        with inference(model, world):
            for _ in range(most):
                with AllocationGuard() as guard:
                    facts = run.feed.data.loader.dataset.facts
                    scores = scores_behind(
                        *(model.call, rows, length, world.device),
                        pad_token_id=facts.pad_token_id,
                        vocab_size=facts.vocab_size,
                    )
                    ids = scores.argmax(-1).tolist()
                if guard.failed:
                    ids = []
                ranks = world.collect([guard.failed, run.was_asked(), ids])
                if any(asked for _, asked, _ in ranks):
                    raise Preempted("stopped while prompts were continued")
                if any(failed for failed, *_ in ranks):
                    return None
                # The first rank's, since two kinds of devices may differ in what is likeliest.
                for place, token in enumerate(ranks[0][-1]):
                    is_open[place] &= len(rows[place]) < length and token not in ends
                    rows[place] += [token] * is_open[place]
                if not any(is_open):
                    break
    finally:
        model.release()
    return rows
