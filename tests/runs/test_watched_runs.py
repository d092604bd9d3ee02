"""What a run says of an odd step: on the screen and in train.log, and nothing else changes."""

from tests.lib.run_support import go, steps


def test_a_loss_that_does_not_fall_is_a_line_on_the_screen_and_in_the_log(capsys):
    line = "batch.global=21 accum.micro=21 scheduler=constant"
    run = go(f"{line} steps=110 optimizer.lr=1e-8").folder
    text = "step 100/110  the loss, "
    assert capsys.readouterr().out.count(text) == 1
    assert (run / "train.log").read_text().count(text) == 1
    assert len(steps(run)) == 110
    go(f"{line} steps=110")
    assert text not in capsys.readouterr().out
