"""Continue the prompts of `log.generate` at evaluations, to show what a model has learnt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, final

import torch

from trainer.assemble.features import Feature
from trainer.assemble.run import Run
from trainer.config.run_config import RunConfig
from trainer.core.errors import ConfigError
from trainer.core.micro_batch import to_device
from trainer.core.out_of_memory import AllocationGuard
from trainer.core.run_folder import RunFolder
from trainer.data.collate import pad_samples
from trainer.data.samples import INPUT_IDS, faults_of
from trainer.objectives.next_token import NextToken
from trainer.objectives.text_output import TextOutput
from trainer.report.console import step_text
from trainer.training.data import Data
from trainer.training.evaluation import inference
from trainer.training.loop import OpenRun

Tokens = list[int]


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
        world, model = run.context.world, run.context.parallel
        model.gather()
        try:
            with inference(model, world):
                world.on_main(lambda: self._show(run))
        finally:
            model.release()

    def _encoded(self, data: Data) -> tuple[list[Tokens], set[int], int]:
        """Give the tokens of each prompt, those that end what follows, and the most of a row."""
        view, prompts, ends = data.train, list[Tokens](), set[int]()
        encode = view.facts.prompt
        with faults_of(f"`prompt` of {view.kind}"):
            assert encode is not None  # see `check`
            for text in self.texts:
                tokens, last = encode(text)
                prompts.append([*map(int, tokens)])
                ends.update(last)
        # Positions beyond those of the data have not been learned, or are none of the model's.
        return prompts, ends, int(view.facts.max_length or data.lengths.max())

    def _show(self, run: OpenRun) -> None:
        """Continue each prompt, and decode what follows, onto the screen and generated.jsonl."""
        step, facts = run.progress.step, run.feed.data.loader.dataset.facts
        decode = facts.decode
        assert decode is not None  # see `check`
        prompts, ends, limit = self._encoded(run.feed.data)
        how = TextOutput(ends=ends, most=self.most, limit=limit, vocab_size=facts.vocab_size)
        rows = [{INPUT_IDS: torch.tensor(tokens)} for tokens in prompts]
        fields = pad_samples(rows, rows[0], max(map(len, prompts)), str, facts.pad_token_id or 0)
        with AllocationGuard() as guard:
            given = to_device(fields, run.context.world.device)
            lines = NextToken().predict(run.context.parallel.call, given, how)
        if guard.failed:
            run.reporter.warn(
                "log.generate: out of memory; nothing was continued, and the run goes on"
            )
            return
        at, found = step_text(step, run.total_steps), list[str]()
        try:
            # Of the whole: what stands alone may be decoded without the space before it.
            for tokens, line in zip(prompts, lines, strict=True):
                behind = decode([*tokens, *line["prediction"]])
                found.append(behind[len(decode(tokens)) :])
        except Exception as error:  # `decode` is the user's, and the run goes on without
            why = f"{type(error).__name__}: {error}"
            run.reporter.warn(f"log.generate: what follows cannot be decoded: {why}")
            return
        for prompt, text in zip(self.texts, found, strict=True):
            run.reporter.record(RunFolder.TEXTS, {"step": step, "prompt": prompt, "text": text})
            run.reporter.line(f"{at}  {prompt!r} -> {text!r}")
