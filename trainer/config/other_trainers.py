"""Say what the settings of other trainers are called here, where no letters tell it.

The pages in `docs/coming-from/` explain them; a test compares these words with those pages.
"""

from __future__ import annotations

from collections.abc import Mapping

_MEANT = {
    "accum.micro": "micro_batch_size device_train_microbatch_size train_micro_batch_size_per_gpu"
    " local_batch_size",
    "accum.packed=true": "packing sample_packing padding_free packed_sequence_size",
    "accum.steps": "gradient_accumulation_steps accumulate_grad_batches batch_accumulate",
    "accum=auto": "auto_find_batch_size auto_scale_batch_size",
    "activation_checkpointing": "gradient_checkpointing activation_checkpoint",
    "adapter.r": "lora_r",
    "adapter.target_modules": "lora_target_modules lora_target_linear match_all_linear",
    "adapter=lora": "use_peft peft",
    "batch.global": "batch_size global_batch_size train_batch_size global_train_batch_size",
    "batch.global, samples of all devices and micro-batches": "per_device_train_batch_size",
    "batch.tail=drop": "dataloader_drop_last drop_last",
    "batchnorm.precise": "precise_bn precise_bn_batch_size",
    "batchnorm=sync": "sync_bn sync_batchnorm convert_sync_batchnorm",
    "checkpoint.best": "metric_for_best_model load_best_model_at_end metric_to_watch",
    "checkpoint.every": "save_steps save_interval save_strategy ckpt_every_steps",
    "checkpoint.keep": "save_total_limit save_top_k save_num_checkpoints_to_keep",
    "checkpoint.mode": "greater_is_better greater_metric_to_watch_is_better",
    "clip_norm": "max_grad_norm gradient_clip_val gradient_clipping clip_grad_norm grad_clip"
    " max_norm",
    "compile": "torch_compile compile_config",
    "data.chat_template": "chat_template_path",
    "data.columns": "dataset_text_field",
    "data.holdout": "val_set_size",
    "data.max_length": "max_seq_length max_length block_size seq_len seq_length sequence_len"
    " max_seq_len model_max_length",
    "data.max_samples": "max_train_samples limit_train_batches overfit_batches",
    "data.path": "dataset_name train_file dataset_path",
    "data.subset": "dataset_config_name",
    "deterministic": "full_determinism",
    "device": "accelerator",
    "ema.decay": "ema_decay ema_params",
    "epochs": "num_train_epochs max_epochs num_epochs",
    "epochs, steps or max_time": "max_duration",
    "eval.at_start": "eval_on_start num_sanity_val_steps",
    "eval.every": "eval_steps eval_strategy eval_interval val_check_interval val_every_steps"
    " check_val_every_n_epoch run_validation_freq",
    "eval.samples": "limit_val_batches max_eval_samples",
    "init": "load_path starting_checkpoint_load_path",
    "log.every": "logging_steps log_every_n_steps steps_per_print log_freq",
    "logger": "report_to",
    "model.path": "model_name_or_path pretrained_model_name_or_path base_model",
    "name": "run_name experiment_name",
    "num_workers": "dataloader_num_workers",
    "objective.label_smoothing": "label_smoothing_factor",
    "optimizer": "optim",
    "optimizer.betas": "adam_beta1 adam_beta2",
    "optimizer.eps": "adam_epsilon",
    "optimizer.lr": "learning_rate lr initial_lr",
    "optimizer.weight_decay": "weight_decay",
    "outputs": "default_root_dir output_dir save_folder ckpt_root_dir",
    "parallel": "strategy ddp_backend",
    "parallel.ranks": "devices num_gpus nproc_per_node num_processes",
    "parallel.replicate": "data_parallel_replicate_degree",
    "parallel.shard": "data_parallel_shard_degree",
    "parallel=fsdp": "fsdp zero_optimization",
    "precision": "mixed_precision",
    "precision=bf16": "bf16",
    "precision=fp16": "fp16",
    "resume": "resume_from_checkpoint ckpt_path",
    "scheduler": "lr_scheduler_type lr_mode lr_decay_style",
    "scheduler.floor": "cosine_final_lr_ratio min_lr_factor min_lr",
    "scheduler.warmup": "warmup_ratio warmup_steps num_warmup_steps lr_warmup_steps t_warmup",
    "scheduler.warmup=5epoch": "lr_warmup_epochs",
    "steps": "max_steps num_steps max_iters",
    "steps=3": "fast_dev_run",
    "stop.patience": "early_stopping_patience",
}
"""What to type here, and what others call it."""

OTHER_WORDS: Mapping[str, str] = {
    word: meant for meant, words in _MEANT.items() for word in words.split()
}

NONE_HERE: Mapping[str, str] = {
    "average_best_models": "type ema.decay=0.999, and step=ema where a run is read",
    "gradient_clip_algorithm": "gradients are clipped by their norm: clip_norm",
    "group_by_length": "leave it out: micro-batches are cut by length, of the same samples",
    "neftune_noise_alpha": "there is no noise in embeddings; a transform of your own may add it",
    "pipeline_parallel_degree": "no layer is split; type parallel=fsdp or parallel=hsdp",
    "push_to_hub": "nothing is uploaded; type train export run=RUN export.to=DIR",
    "tensor_parallel_degree": "no layer is split; type parallel=fsdp or parallel=hsdp",
    "tp_size": "no layer is split; type parallel=fsdp or parallel=hsdp",
}
"""Settings that have no counterpart, and what to do instead."""

REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        ("load_in_4bit", "load_in_8bit"),
        "quantised weights are not supported, since no step over them can be proven exact; type "
        "adapter=lora model.dtype=bfloat16",
    ),
    "streaming": "records are read at random, so that every step is known before: files are mapped "
    "and not loaded, so leave it out; for a try type data.max_samples=1000",
}
"""Settings that are refused as arguments of a class of this program, too."""
