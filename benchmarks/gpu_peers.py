"""What the trainer is compared with on a GPU: a hand-written loop, and Hugging Face's Trainer.

All have the model of `trainer.models.gpt`, compiled together with its loss, bf16 autocast, fused
AdamW and clipping, and fixed micro-batches. The hand loop is nanoGPT's, with the exact loss of the
whole step, its vocabulary padded to a multiple of 128. Documents are padded to the longest of their
micro-batch but where padding-free collation lays them end to end.
"""

from __future__ import annotations

import inspect
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from gpu_run import Scale, synchronize
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.core.micro_batch import IGNORED
from trainer.data.collate import pad_samples
from trainer.models.gpt import GPT

Sample = Mapping[str, Tensor]


@final
@dataclass
class Turn:
    """What some optimizer steps took.

    Attributes:
        positions: computed, padding counted.
    """

    tokens: int
    positions: int
    seconds: float


class SummedLoss(nn.Module):
    """The model with its loss, the sum over targets: what is compiled."""

    def __init__(self, scale: Scale, *, multiple: int = 1) -> None:
        super().__init__()
        shape = dict(scale.shape)
        shape["vocab_size"] = -(-shape["vocab_size"] // multiple) * multiple
        gpt2 = {"tied": True, "norm": "layer", "mlp": "gelu", "positions": "learned"}
        self.model = GPT(**shape, **gpt2, bias=True, init_std=0.02)

    def forward(self, input_ids: Tensor, targets: Tensor, **documents: Any) -> Tensor:  # noqa: ANN401
        """Sum the cross entropy; `targets` are already those of the next token."""
        logits = self.model(input_ids, **documents)
        return F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )


def fused_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Give the optimizer of everybody."""
    return torch.optim.AdamW(model.parameters(), lr=6e-4, weight_decay=0.01, fused=True)


def next_tokens(labels: Tensor) -> Tensor:
    """Shift labels `(batch, time)` to the position that predicts them."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


def padded(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """Pad samples to the longest; the first label, which nothing predicts, is left out."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    fields = pad_samples(samples, ("input_ids", "labels"), longest, str)
    fields["labels"][:, 0] = IGNORED
    return fields


@final
class HandLoop:
    """nanoGPT's loop."""

    def __init__(self, scale: Scale) -> None:
        self.scale = scale
        torch.manual_seed(0)
        self.model = SummedLoss(scale, multiple=128).to(scale.device)
        self.optimizer = fused_adamw(self.model)
        self.model.compile()

    def __call__(self, samples: Sequence[Sample], num_steps: int) -> Turn:
        """Take some steps."""
        size, positions = len(samples) // num_steps, 0
        synchronize()
        began = time.perf_counter()
        for step in range(num_steps):
            positions += self._step(samples[step * size : (step + 1) * size])
        synchronize()
        seconds = time.perf_counter() - began
        return Turn(sum(len(s["input_ids"]) for s in samples), positions, seconds)

    def _step(self, samples: Sequence[Sample]) -> int:
        scale, positions = self.scale, 0
        count = sum(len(sample["input_ids"]) - 1 for sample in samples)
        for begin in range(0, len(samples), scale.micro):
            fields = padded(samples[begin : begin + scale.micro])
            positions += fields["input_ids"].numel()
            ids, targets = fields["input_ids"], next_tokens(fields["labels"])
            if scale.is_gpu:
                ids, targets = (
                    f.pin_memory().to("cuda", non_blocking=True) for f in (ids, targets)
                )
            with torch.autocast(scale.device, torch.bfloat16):
                total = self.model(ids, targets)
            (total / count).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return positions


class WithLoss(nn.Module):
    """The model as Hugging Face's Trainer calls its own."""

    accepts_loss_kwargs = True

    def __init__(self, inner: SummedLoss) -> None:
        super().__init__()
        self.inner, self.positions = inner, 0

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        max_length_q: int | None = None,
        num_items_in_batch: Tensor | int = 1,
        **_: object,  # of padding-free collation, the rest
    ) -> dict[str, Tensor]:
        """Give the share that a micro-batch has of the step's mean loss."""
        self.positions += input_ids.numel()
        documents: dict[str, Any] = {}
        if cu_seq_lens_q is not None:
            documents = {"cu_seqlens": cu_seq_lens_q, "position_ids": position_ids}
            documents["max_seqlen"] = max_length_q
        total = self.inner(input_ids, next_tokens(labels), **documents)
        return {"loss": total / num_items_in_batch}


@final
@dataclass
class HuggingFace:
    """`transformers.Trainer` around one model, a fresh one for every turn."""

    scale: Scale
    model: WithLoss
    optimizer: torch.optim.Optimizer
    options: Mapping[str, Any] = field(default_factory=dict)
    is_flat: bool = False

    def __call__(self, samples: Sequence[Sample], num_steps: int) -> Turn:
        """Take some steps; one more before them is not timed."""
        import transformers  # noqa: PLC0415 - may be missing

        transformers.logging.set_verbosity_error()
        scale, size, marks = self.scale, len(samples) // num_steps, list[tuple[float, int]]()

        def mark(*_: object) -> None:
            synchronize()
            marks.append((time.perf_counter(), self.model.positions))

        class InOrder(transformers.Trainer):
            """Takes samples as they come."""

            def _get_train_sampler(self, train_dataset: Any = None) -> Any:  # noqa: ANN401
                sampler = super()._get_train_sampler(train_dataset)
                if hasattr(sampler, "shuffle"):
                    sampler.shuffle = False
                return sampler

        collator: Any = padded
        if self.is_flat:
            flatten = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
            collator = AsLists(flatten)
        handle = self.optimizer.register_step_post_hook(mark)
        with tempfile.TemporaryDirectory() as folder:
            arguments = transformers.TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=scale.micro,
                gradient_accumulation_steps=size // scale.micro,
                max_steps=num_steps + 1,
                bf16=True,
                max_grad_norm=1.0,
                use_cpu=not scale.is_gpu,
                dataloader_num_workers=4 if scale.is_gpu else 0,
                remove_unused_columns=False,
                disable_tqdm=True,
                report_to="none",
                save_strategy="no",
                logging_strategy="no",
                **{"train_sampling_strategy": "sequential", **self.options},
            )
            constant = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda _: 1.0)
            trainer = InOrder(
                model=self.model,
                args=arguments,
                data_collator=collator,
                train_dataset=[*samples[:size], *samples],
                optimizers=(self.optimizer, constant),
            )
            trainer.remove_callback(transformers.PrinterCallback)
            try:
                trainer.train()
            finally:
                handle.remove()
        (began, before), (ended, after) = marks[0], marks[-1]
        tokens = sum(len(sample["input_ids"]) for sample in samples)
        return Turn(tokens, after - before, ended - began)


@final
@dataclass
class AsLists:
    """Gives a collator of Hugging Face's lists of numbers, which it takes."""

    collator: Callable[[list[dict[str, Any]]], dict[str, Any]]

    def __call__(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Collate."""
        return self.collator([{n: v.tolist() for n, v in sample.items()} for sample in samples])


Peer = Callable[[Sequence[Sample], int], Turn]

HAND = "hand loop"


def make_peers(scale: Scale) -> tuple[dict[str, Peer], dict[str, str]]:
    """Make all that is installed.

    Returns:
        By name, and why others are missing.
    """
    peers: dict[str, Peer] = {HAND: HandLoop(scale)}
    names = {
        "hf padded": {},
        "hf batch_rebalance": {"train_sampling_strategy": "batch_rebalance"},
        "hf padding-free": {},
    }
    try:
        import accelerate  # noqa: F401, PLC0415
        import transformers  # noqa: PLC0415

        known = inspect.signature(transformers.TrainingArguments).parameters
    except ImportError as error:
        return peers, dict.fromkeys(names, f"not installed ({error.name})")
    torch.manual_seed(0)
    model = WithLoss(SummedLoss(scale).to(scale.device))
    model.inner.compile()
    optimizer, missing = fused_adamw(model), {}
    for name, options in names.items():
        if unknown := [option for option in options if option not in known]:
            missing[name] = f"transformers {transformers.__version__} has no {unknown[0]}"
            continue
        is_flat = name == "hf padding-free"
        peers[name] = HuggingFace(scale, model, optimizer, options, is_flat)
    return peers, missing
