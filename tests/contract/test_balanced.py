"""DoubleExperts are balanced over the whole global batch, however it is cut."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from tests.lib.heads import VOCABULARY, Head
from tests.lib.pair_toys import DoubleExperts
from tests.lib.ranks_work import MODES, error, gradient_of_step
from tests.lib.support import Bench, RaggedText, replicated
from trainer import train
from trainer.accumulate.sum import Sum
from trainer.accumulate.two_pass import TwoPass
from trainer.core.errors import ConfigError
from trainer.core.world import World
from trainer.features.heads.balanced import BalancedNextToken
from trainer.plan.cuts import Budget, Fixed

EXACT, SINGLE, WRONG = 1e-12, 1e-6, 1e-3  # Mixtral normalises in fp32
OBJECTIVE = BalancedNextToken(coefficient=1.0)
MIXTRAL = {"num_hidden_layers": 2, "num_experts_per_tok": 2, "num_local_experts": 4}
MIXTRAL |= {"output_router_logits": True, "initializer_range": 0.5}


class Text(RaggedText):
    """With a mask, which leaves padding out of the balance."""

    def __getitem__(self, index):
        tokens = self.samples[index]
        return {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}


def mixtral() -> nn.Module:
    return Head("MixtralForCausalLM", "MixtralConfig", "causal", MIXTRAL).build()


def gradient_of(world, cut, strategy, build=mixtral, objective=OBJECTIVE):
    lay_out = MODES["ddp"] if world.size > 1 else replicated
    how = {"dataset": Text(), "model": build, "objective": objective, "strategy": strategy}
    return gradient_of_step(Bench(cut, world=world, lay_out=lay_out, **how))


@pytest.mark.parametrize(
    ("build", "objective"),
    [
        (mixtral, OBJECTIVE),
        (DoubleExperts, BalancedNextToken(coefficient=1.0, experts_per_token=1)),
    ],
)
def test_every_cut_and_two_ranks_give_the_gradient_of_the_whole_batch(build, objective, ranks):
    limit = EXACT if build is DoubleExperts else SINGLE
    two, how = TwoPass(objective), (build, objective)
    whole, loss, _ = gradient_of(World(), Fixed(steps=1), Sum(), *how)
    for cut in (Fixed(micro=1), Fixed(micro=3), Budget(max_tokens=60)):
        found, total, _ = gradient_of(World(), cut, two, *how)
        assert error(found, whole) <= limit, cut
        assert total == pytest.approx(loss, rel=limit)
        naive, *_ = gradient_of(World(), cut, Sum(), *how)
        assert error(naive, whole) > WRONG
    for found, *_ in ranks.run(2, gradient_of, Fixed(micro=3), two, *how):
        assert error(found, whole) <= limit


def test_it_is_the_balance_of_transformers():
    module = mixtral().double()
    ids = torch.randint(0, VOCABULARY, (3, 7))
    fields = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    fields["attention_mask"][0, 4:] = 0
    output = module(input_ids=ids, attention_mask=fields["attention_mask"])
    balance = load_balancing_loss_func(output.router_logits, 4, 2, fields["attention_mask"])
    entropy = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    objective = BalancedNextToken(coefficient=1.0, experts_per_token=2)
    losses = objective.sums(lambda given: module(**given), fields).losses
    weights = objective.weights(fields)
    means = {name: float(loss.detach()) / weights[name] for name, loss in losses.items()}
    assert means["balance"] == pytest.approx(float(balance.detach()), rel=1e-6)
    assert means["cross_entropy"] == pytest.approx(float(entropy.detach()), rel=EXACT)


def test_a_router_that_corrects_its_scores_is_refused():
    experts = DoubleExperts()
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
