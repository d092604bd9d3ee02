"""The kinds of run that are compared on a CPU and on the emulated GPU."""

from collections.abc import Mapping

GPT = (
    "model=gpt_tiny model.width=16 model.num_layers=1 model.num_heads=2 model.max_length=64 "
    "data=text data.path=corpus.jsonl data.max_length=48 eval.samples=8"
)
CUT = "accum=budget accum.max_tokens=96"
PICTURES = "data=digits eval.samples=8 batch.global=24 accum=fixed accum.micro=8"
RESNET = f"{PICTURES} model=resnet model.width=4 model.stages=2"
TOWERS = "data._target_=tests.lib.pair_toys.Pairs model._target_=tests.lib.pair_toys.Towers"
HF = f"data=hf {CUT} model=hf"

KINDS: Mapping[str, str] = {
    "auto": f"{GPT} accum=auto",
    "deep": f"{GPT} accum=auto model.num_layers=3",
    "mixed devices": "data._target_=tests.lib.run_toys.Rows model._target_=tests.lib.run_toys.Net",
    "fixed": f"{GPT} accum=fixed accum.micro=3",
    "budget": f"{GPT} {CUT}",
    "packed": f"{GPT} {CUT} accum.packed=true",
    "recomputed": f"{GPT} {CUT} activation_checkpointing=true",
    "tokens": f"{GPT} {CUT} batch.unit=tokens batch.global=300",
    "ramp": f"{GPT} accum=fixed accum.micro=4 batch=ramp batch.stages={{0:4,12:8}}",
    "half precision": f"{GPT} {CUT} precision=fp16",
    "wide gradients": f"{GPT} {CUT} accum.buffer=fp32",
    "average": f"{GPT} {CUT} ema.decay=0.9",
    "noise scale": f"{GPT} {CUT} log.noise_scale=2",
    "norms": f"{GPT} {CUT} log.parameters=2",
    "muon": f"{GPT} {CUT} optimizer=muon",
    "sgd": f"{GPT} {CUT} optimizer=sgd optimizer.momentum=0.9",
    "layer decay": f"{GPT} {CUT} optimizer.layer_decay=0.5",
    "optimizer of PyTorch": f"{GPT} {CUT} optimizer._target_=torch.optim.Adam optimizer.eps=1e-6",
    "deterministic": f"{GPT} {CUT} deterministic=true",
    "asynchronous": f"{GPT} {CUT} checkpoint.asynchronous=true",
    "profile": f"{GPT} {CUT} profile=1",
    "adapter": f"{HF} model.path=llama data.path=corpus.jsonl adapter=lora",
    "deep adapter": f"{HF} model.path=deep data.path=corpus.jsonl adapter=lora",
    "prompts": f"{GPT} {CUT} log.generate=[ab] log.generate_tokens=4",
    "ghost": f"{RESNET} batchnorm=ghost batchnorm.group=4",
    "pooled": f"{RESNET} batchnorm=pooled",
    "micro": f"{RESNET} batchnorm=micro",
    "precise": f"{RESNET} batchnorm=micro batchnorm.precise=16",
    "vit": f"{PICTURES} model=vit model.width=16 model.depth=1",
    "contrastive": f"{TOWERS} objective=contrastive {CUT}",
    "fixed temperature": f"{TOWERS} objective=contrastive objective.temperature=0.1 {CUT}",
    "llama": f"{HF} model.path=llama data.path=corpus.jsonl",
    "chat": f"{HF} model.path=llama data.path=chat.jsonl",
    "chat adapter": f"{HF} model.path=llama data.path=chat.jsonl adapter=lora",
    "prompt and completion": f"{HF} model.path=llama data.path=pairs.jsonl",
    "masked": f"{HF} model.path=bert data.path=corpus.jsonl",
    "classes": f"{HF} model.path=bert model.task=sequence_classification data.path=reviews.csv",
    "sequences": f"{HF} model.path=t5 data.path=summaries.jsonl",
}
"""A line for each kind of run. Cuts are given, as a GPU would be cut for otherwise."""
