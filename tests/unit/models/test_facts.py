"""What is known of a model: by whoever made it, and by its library."""

from torch import nn

from trainer.models.facts import ModelFacts, facts_of, noted


class BertForMaskedLM(nn.Module):
    """Named as a class of transformers, which says what it is made for."""


def test_what_a_maker_states_counts_before_what_a_library_finds():
    assert not facts_of(BertForMaskedLM()).has_targets
    stated = ModelFacts(max_positions=12, has_targets=True)
    facts = facts_of(noted((BertForMaskedLM(), stated)))
    assert (facts.task, facts.max_positions, facts.has_targets) == ("masked_lm", 12, True)
