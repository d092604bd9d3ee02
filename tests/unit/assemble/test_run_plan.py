"""What a run that goes on takes from its checkpoint."""

from tests.reliability import lab
from trainer.assemble.build import assemble
from trainer.assemble.run import Run
from trainer.assemble.run_plan import prepare
from trainer.assemble.saved import Saved, Terms, check_terms
from trainer.core.world import World


def test_sync_auto_stays_what_it_was_on_the_same_ranks():
    typed = ("command=plan", "parallel=hsdp", "parallel.ranks=4", "parallel.shard=2")

    def begun(*recorded: object, also: str = "seed=0") -> Run:
        terms = Terms.model_validate({"sync": recorded or None})
        return assemble(lab.config(*typed, also), World(size=4, local_size=4), Saved(terms=terms))

    first = begun("hsdp", 4, "hierarchical")
    assert first.model.setup.sync.name == "hierarchical"
    assert first.layout.lockstep
    assert prepare(first).run.model.setup.why.startswith("sync=auto takes hierarchical as before: ")
    assert check_terms(first, Terms()).sync == ("hsdp", 4, "hierarchical")
    others = [(), ("hsdp", 2, "hierarchical"), ("fsdp", 4, "hierarchical"), ("hsdp", 4, "unknown")]
    assert {begun(*each).model.setup.sync.name for each in others} == {"deferred"}
    asked = begun("hsdp", 4, "hierarchical", also="sync=deferred")
    assert asked.model.setup.sync.name == "deferred"
    assert check_terms(asked, Terms()).sync is None
