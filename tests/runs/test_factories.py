"""A model made of classes within: trained, and everything after that."""

from tests.lib.run_support import TOYS, go, only_run, read_json, shell

MODEL = (
    f"model._target_={TOYS}.Whole model.net._target_={TOYS}.Net.of model.net.width=4 "
    "model.norm._target_=torch.nn.LayerNorm model.norm._partial_=true "
    "'model.more=[{_target_:torch.nn.Linear,in_features:16,out_features:16}]'"
)


def test_a_model_that_a_factory_makes_does_all_that_a_model_does(capsys):
    go(f"{MODEL} steps=2 eval.every=2 data.holdout=0.2")
    run = only_run()
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  train ")]
    words = [line.split()[1].partition("=")[0] for line in printed]
    assert words == ["evaluate", "export", "resume"]
    for line in printed:
        assert shell(line.removeprefix("  train ")) == 0, line
    assert read_json(run / "result.json")["step"] == 4
    assert go(f"{MODEL} init=exported steps=1").exit_code == 0
