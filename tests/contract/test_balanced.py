"""Experts are balanced over the whole global batch, however it is cut."""

import json
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from tests.lib.pair_toys import Experts
from tests.lib.ranks_support import Ranks
from tests.lib.ranks_work import MODES, error, plain
from tests.lib.support import Bench, RaggedText, replicated
from trainer import train
from trainer.accumulate.sum import Sum
from trainer.accumulate.two_pass import TwoPass
from trainer.core.errors import ConfigError
from trainer.core.world import World
from trainer.objectives.balanced import BalancedNextToken
from trainer.plan.cuts import Budget, Fixed
from trainer.training.step import train_step

EXACT, SINGLE, WRONG = 1e-12, 1e-6, 1e-3  # Mixtral normalises in fp32
OBJECTIVE = BalancedNextToken(coefficient=1.0)


class Text(RaggedText):
    """With a mask, which leaves padding out of the balance."""

    def __getitem__(self, index):
        tokens = self.samples[index]
        return {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}


def mixtral() -> nn.Module:
    module = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            **{"vocab_size": 64, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2},
            **{"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4},
            **{
                "output_router_logits": True,
                "initializer_range": 0.5,
                "attn_implementation": "eager",
            },
        )
    )
    module.set_experts_implementation("eager")  # the fast one knows no float64
    return module


def gradient_of(world, cut, strategy, build=mixtral, objective=OBJECTIVE):
    bench = Bench(
        cut,
        dataset=Text(),
        model=build,
        objective=objective,
        strategy=strategy,
        world=world,
        lay_out=MODES["ddp"] if world.size > 1 else replicated,
    )
    found = {}

    def keep(*_):
        named = bench.module.named_parameters()
        found.update({n: plain(p.grad) for n, p in named if p.grad is not None})

    bench.context.optimizer.register_step_pre_hook(keep)
    report = train_step(bench.context, bench.feed.next(), bench.feed)
    bench.feed.close()
    return found, float(report.loss)


@pytest.mark.parametrize(
    ("build", "objective"),
    [(mixtral, OBJECTIVE), (Experts, BalancedNextToken(coefficient=1.0, experts_per_token=1))],
)
def test_every_cut_and_two_ranks_give_the_gradient_of_the_whole_batch(build, objective):
    limit = EXACT if build is Experts else SINGLE
    two, how = TwoPass(objective), {"build": build, "objective": objective}
    whole, loss = gradient_of(World(), Fixed(steps=1), Sum(), **how)
    for cut in (Fixed(micro=1), Fixed(micro=3), Budget(max_tokens=60)):
        found, total = gradient_of(World(), cut, two, **how)
        assert error(found, whole) <= limit, cut
        assert total == pytest.approx(loss, rel=limit)
        naive, _ = gradient_of(World(), cut, Sum(), **how)
        assert error(naive, whole) > WRONG
    ranks = Ranks()
    try:
        for found, _ in ranks.run(2, partial(gradient_of, **how), Fixed(micro=3), two):
            assert error(found, whole) <= limit
    finally:
        ranks.close()


def test_it_is_the_balance_of_transformers():
    module = mixtral().double()
    reference = transformers.models.mixtral.modeling_mixtral.load_balancing_loss_func
    ids = torch.randint(0, 64, (3, 7))
    fields = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    fields["attention_mask"][0, 4:] = 0
    output = module(input_ids=ids, attention_mask=fields["attention_mask"])
    expected = reference(output.router_logits, 4, 2, fields["attention_mask"])
    objective = BalancedNextToken(coefficient=1.0, experts_per_token=2)
    sums = objective.sums(lambda given: module(**given), fields)
    weights = objective.weights(fields)
    assert float(sums.losses["balance"].detach()) / weights["balance"] == pytest.approx(
        float(expected.detach()), rel=1e-6
    )
    own = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert float(sums.losses["cross_entropy"].detach()) / weights["cross_entropy"] == pytest.approx(
        float(own.detach()), rel=EXACT
    )


def test_a_router_that_corrects_its_scores_is_refused():
    experts = Experts()
    experts.register_buffer("e_score_correction_bias", torch.zeros(4))
    with pytest.raises(ConfigError, match="corrects its scores by e_score_correction_bias"):
        gradient_of(World(), Fixed(steps=1), TwoPass(OBJECTIVE), build=lambda: experts)


@pytest.mark.nightly
def test_a_typed_objective_that_leaves_the_balance_out_says_so(tmp_path):
    (tmp_path / "moe.json").write_text(json.dumps(mixtral().config.to_dict() | {"vocab_size": 300}))
    (tmp_path / "text.txt").write_text("a line of text\n" * 40)
    data = f"data=text data.path={tmp_path}/text.txt tokenizer=bytes data.max_length=16"
    model = f"model=hf model.config={tmp_path}/moe.json model.task=causal_lm"
    line = f"{model} {data} batch.global=4 accum=fixed accum.micro=2"
    for name, count in (("next_token", 1), ("next_token_balanced", 0)):
        plan = train(["plan", *line.split(), "steps=1", f"objective={name}"]).result
        found = [each for each in plan["warnings"] if "balance loss of the model's router" in each]
        assert len(found) == count
