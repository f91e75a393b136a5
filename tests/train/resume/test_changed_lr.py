"""What the first lines of a resumed run say of its tokens and of its learning rate."""

import re

import pytest

from nanotrain.train.main import main
from tests.train.small_run import arguments, metrics_of

pytestmark = pytest.mark.usefixtures("logging_as_before")
CURVE = ["--lr", "4.7e-3", "--min-lr", "1.5e-6", "--global-batch-size", "4", "--no-report"]


def test_more_steps_of_a_finished_curve_name_both_learning_rates(tmp_path, capfd):
    assert main(arguments(tmp_path, *CURVE, "--train-iters", "4")) == 0
    capfd.readouterr()
    assert main(arguments(tmp_path, *CURVE, "--train-iters", "8")) == 0
    error = capfd.readouterr().err
    found = re.search(r"the learning rate of step 5 is (\S+); with .* it was (\S+) ", error)
    assert found is not None and float(found[2]) == 1.5e-6
    assert float(found[1]) == pytest.approx(metrics_of(tmp_path)[4]["lr"], rel=1e-2)
    # the same settings again, with nothing to say
    assert main(arguments(tmp_path, *CURVE, "--train-iters", "8")) == 0
    assert "learning rate of step" not in capfd.readouterr().err


def test_the_header_counts_the_tokens_of_the_steps_that_are_left(tmp_path, capfd):
    constant = [*CURVE, "--lr-decay-style", "constant"]
    assert main(arguments(tmp_path, *constant, "--train-iters", "4")) == 0
    assert "synthetic, 256 tokens in 4 steps" in capfd.readouterr().err
    wider = ["--global-batch-size", "8", "--train-iters", "6"]
    assert main(arguments(tmp_path, *constant, *wider)) == 0
    error = capfd.readouterr().err
    assert "synthetic, 256 tokens in 2 steps after step 4" in error
    assert "learning rate of step" not in error
