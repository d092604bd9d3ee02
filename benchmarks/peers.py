"""Other trainers, each as its own manual uses it, on the same model, documents and optimizer.

Nothing of them is imported before it is asked for; what is not installed raises ImportError.
All take the same documents in fixed micro-batches of 8, each padded to its own longest, but for
what is the point of one: Hugging Face's two samplers that sort, and Composer, which pads the whole
global batch and then splits it. None clips, logs, shows a bar, saves or evaluates.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from trainer.core.micro_batch import IGNORED
from trainer.data.collate import pad_samples
from trainer.data.samples import Sample
from trainer.objectives.next_token import shifted_labels


@final
@dataclass(frozen=True, kw_only=True)
class Task:
    """Some steps for a trainer to take.

    Attributes:
        model: gives logits for `input_ids`; trained in place.
        optimizer: over its parameters.
        documents: one global batch after the other.
        num_steps: optimizer steps.
        global_batch: documents behind each.
        micro: documents of a micro-batch.
        bf16: run the forward under autocast.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    documents: Sequence[Sample]
    num_steps: int
    global_batch: int
    micro: int
    bf16: bool

    @property
    def accum_steps(self) -> int:
        """Micro-batches of a step."""
        return self.global_batch // self.micro

    def loader(self, size: int) -> DataLoader[Any]:
        """Give batches of documents in order."""
        return DataLoader(self.documents, batch_size=size, collate_fn=collate)  # type: ignore[arg-type]


@final
class WithLoss(nn.Module):
    """The model as most trainers want it: its forward gives the mean loss.

    Hugging Face's trainer passes the number of predicted tokens of the whole step, as it does to
    its own models, and the loss is then divided by that.
    """

    accepts_loss_kwargs = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        attention_mask: Tensor | None = None,
        num_items_in_batch: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Give the mean cross entropy, or the sum's share of the step."""
        total, count = summed_loss(self.model(input_ids), labels)
        return {"loss": total / (count if num_items_in_batch is None else num_items_in_batch)}


def summed_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the cross entropy of the next token, and count what it is over."""
    targets = shifted_labels({"labels": labels}).flatten()
    logits = logits if logits.dtype == torch.float64 else logits.float()
    total = F.cross_entropy(logits.flatten(0, 1), targets, ignore_index=IGNORED, reduction="sum")
    return total, (targets != IGNORED).sum()


def collate(documents: Sequence[Sample]) -> dict[str, Tensor]:
    """Pad documents to the longest of them.

    The first label is one that no token predicts. It is taken out, so that who counts labels
    counts the terms of the loss.
    """
    longest = max(len(document["input_ids"]) for document in documents)
    fields = pad_samples(documents, ("input_ids", "labels"), longest, str)
    fields["labels"][:, 0] = IGNORED
    return fields


def hand_loop(task: Task) -> None:
    """Train as one would by hand, with the exact loss: sums over the tokens of the whole step."""
    for step in range(task.num_steps):
        mine = task.documents[step * task.global_batch : (step + 1) * task.global_batch]
        batches = [collate(mine[k : k + task.micro]) for k in range(0, len(mine), task.micro)]
        count = sum(int((shifted_labels(batch) != IGNORED).sum()) for batch in batches)
        for batch in batches:
            with torch.autocast("cpu", torch.bfloat16, enabled=task.bf16):
                logits = task.model(batch["input_ids"])
            total, _ = summed_loss(logits, batch["labels"])
            (total / count).backward()
        task.optimizer.step()
        task.optimizer.zero_grad()


def hugging_face(task: Task, *, sampling: str = "sequential") -> None:
    """Train with `transformers.Trainer`."""
    import transformers  # noqa: PLC0415

    class Sequential(transformers.Trainer):
        """Takes the documents of a step as they come, so that all trainers take the same."""

        def _get_train_sampler(self, train_dataset: Any = None) -> Any:  # noqa: ANN401
            sampler = super()._get_train_sampler(train_dataset)
            if sampling == "batch_rebalance":
                sampler.shuffle = False
            return sampler

    transformers.logging.set_verbosity_error()
    forget_accelerate()
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=task.micro,
            gradient_accumulation_steps=task.accum_steps,
            max_steps=task.num_steps,
            train_sampling_strategy=sampling,
            bf16=task.bf16,
            max_grad_norm=0.0,
            use_cpu=True,
            disable_tqdm=True,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
        )
        constant = LambdaLR(task.optimizer, lambda _: 1.0)
        trainer = Sequential(
            model=WithLoss(task.model),
            args=arguments,
            data_collator=collate,
            train_dataset=task.documents,
            optimizers=(task.optimizer, constant),
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()


def lightning(task: Task) -> None:
    """Train with `lightning.Trainer`."""
    import lightning  # noqa: PLC0415

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        """The model with its mean loss."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = WithLoss(task.model)

        def training_step(self, batch: Mapping[str, Tensor]) -> Tensor:
            """Give the loss of one micro-batch."""
            return self.inner(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            """Give the optimizer."""
            return task.optimizer

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=task.num_steps,
        accumulate_grad_batches=task.accum_steps,
        precision="bf16-mixed" if task.bf16 else "32-true",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(Module(), task.loader(task.micro))


def accelerate(task: Task) -> None:
    """Train with `accelerate.Accelerator`, in the loop of its manual."""
    from accelerate import Accelerator  # noqa: PLC0415

    forget_accelerate()
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=task.accum_steps,
        mixed_precision="bf16" if task.bf16 else "no",
    )
    model, optimizer, loader = accelerator.prepare(
        WithLoss(task.model), task.optimizer, task.loader(task.micro)
    )
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()


def forget_accelerate() -> None:
    """Let the next accelerator of this process choose its own precision."""
    from accelerate.state import AcceleratorState, GradientState  # noqa: PLC0415

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def composer(task: Task) -> None:
    """Train with `composer.Trainer`, which splits a batch after it was padded as one."""
    from composer import Trainer  # noqa: PLC0415
    from composer.models import ComposerModel  # noqa: PLC0415

    class Model(ComposerModel):
        """The model with its mean loss."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = WithLoss(task.model)

        def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
            """Give the mean loss."""
            return self.inner(**batch)["loss"]

        def loss(self, outputs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
            """Pass it on."""
            return outputs

    Trainer(
        model=Model(),
        train_dataloader=task.loader(task.global_batch),
        max_duration=f"{task.num_steps}ba",
        optimizers=task.optimizer,
        device="cpu",
        device_train_microbatch_size=task.micro,
        precision="amp_bf16" if task.bf16 else "fp32",
        progress_bar=False,
    ).fit()


PEERS: Mapping[str, Callable[[Task], None]] = {
    "hand loop": hand_loop,
    "hugging face": hugging_face,
    "hf group_by_length": partial(hugging_face, sampling="group_by_length"),
    "hf batch_rebalance": partial(hugging_face, sampling="batch_rebalance"),
    "lightning": lightning,
    "accelerate": accelerate,
    "composer": composer,
}
