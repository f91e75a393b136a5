"""A spike of the loss: back to the newest checkpoint, its data skipped, and the same after a
resume.
"""

from dataclasses import replace

import pytest
import torch

from nanotrain.errors import TrainingFault
from nanotrain.train.hooks.checkpoint import CheckpointHook
from nanotrain.train.hooks.hook import Hook
from nanotrain.train.hooks.log import LogHook
from nanotrain.train.resume.rollback import MIN_LOSSES, WINDOW, count_loss
from nanotrain.train.run import TrainState
from tests.train.small_run import Spy, metrics_of, small_run, train

FLAGS = (
    "--train-iters",
    "14",
    "--save-interval",
    "4",
    "--rollback-on-spike",
    "1.2",
    "--global-batch-size",
    "2",
)
BF16 = ("--bf16", "--data-parallel-sharding-strategy", "optim_grads_params")
BAD = range(20, 22)  # the samples of step 11


class Poisoned:
    """A dataset in which each token is one label, but whose samples in `BAD` have other labels:
    their loss is high.
    """

    def __init__(self, dataset, bad) -> None:
        self.dataset, self.bad, self.read = dataset, bad, []
        self.samples_per_epoch = dataset.samples_per_epoch

    def __getitem__(self, index):
        self.read.append(index)
        sample = self.dataset[index]
        sample.labels[:] = 9 if index in self.bad else 7
        return sample


def losses_and_reads(folder, *flags, bad=BAD, hooks=()):
    """Train; the losses by step in the order in which they were taken, the samples read, and the
    weights.
    """
    spy = Spy()
    with small_run(folder, *FLAGS, "--lr", "1e-2", *flags) as run:
        data = Poisoned(run.inputs.datasets.train, bad)
        run.batches.dataset = data
        run.batches.restart(
            consumed_samples=run.state.consumed_samples, skipped_samples=run.state.skipped_samples
        )
        train(run, spy, CheckpointHook(), *hooks)
        main = {box.name: tensor.clone() for box, tensor in run.optimizer.state_tensors().items()}
        return (
            [(report.step, report.output.loss, report.lr) for report in spy.reports],
            data.read,
            (run.state, main),
        )


def test_a_spike_is_relative_to_the_median_of_the_newest_losses():
    state = TrainState(recent_losses=[1.0] + [4.0] * (MIN_LOSSES - 1))
    assert not count_loss(state, 5.9, factor=1.5) and count_loss(state, 6.1, factor=1.5)
    falling = [100.0 - step for step in range(WINDOW + 10)]
    state = TrainState()
    assert not any(count_loss(state, loss, factor=1.5) for loss in falling)
    assert state.recent_losses == falling[-WINDOW:]


@pytest.mark.parametrize("flags", [(), BF16], ids=["fp32", "bf16, ZeRO-3"])
def test_a_spike_goes_back_and_skips_its_data_and_a_resume_does_the_same(tmp_path, logged, flags):
    reports, read, (state, main) = losses_and_reads(tmp_path / "run", *flags, hooks=[LogHook()])

    # step 11 is rolled back to step 8
    assert [step for step, _, _ in reports] == [*range(1, 11), *range(9, 15)]
    first_read = list(dict.fromkeys(read))
    assert first_read[:34] == list(range(34)), (
        "no sample is read twice, the data of steps 9 to 11 is skipped"
    )
    assert (state.consumed_samples, state.skipped_samples, state.spike_step) == (28, 6, 11)
    assert any("back to step 8, 6 samples skipped" in line for line in logged)
    assert [row["step"] for row in metrics_of(tmp_path / "run")] == list(range(1, 15))
    superseded = (tmp_path / "run" / "metrics-superseded.jsonl").read_text().splitlines()
    assert len(superseded) == 3  # of steps 9 to 11

    # A run that skipped the same samples without a spike has the same losses, learning rates and
    # bits.
    losses_and_reads(tmp_path / "other", *flags, "--exit-interval", "8", bad=())
    stopped = tmp_path / "run" / "checkpoints"
    resumed, _, (again, same) = losses_and_reads(
        tmp_path / "other", *flags, "--load", str(stopped / "step-00000012"), bad=BAD
    )
    assert resumed == reports[-2:] and again.recent_losses == state.recent_losses
    assert all(torch.equal(same[name], tensor) for name, tensor in main.items())


class ReadAhead(Hook):
    """Batches are read one step ahead, as on a GPU."""

    def before_training(self, run) -> None:
        run.batch_iterator._options = replace(run.batch_iterator._options, is_ahead=True)


@pytest.mark.parametrize("hooks", [(), (ReadAhead(),)], ids=["", "ahead"])
def test_a_second_spike_skips_its_data_too_and_no_step_has_that_of_another(tmp_path, hooks):
    # step 13 has samples 30 and 31, after the rollback from step 11 has skipped six
    _, read, (state, _) = losses_and_reads(tmp_path, bad=(*BAD, 30, 31), hooks=hooks)
    assert (
        state.consumed_samples,
        state.skipped_samples,
        state.spike_step,
        state.rollback_step,
    ) == (28, 8, 13, 12)
    assert list(dict.fromkeys(read)) == list(range(28 + 8 + 2 * len(hooks))), (
        "the last batch ahead is not used"
    )


def test_a_spike_before_the_step_of_the_last_one_goes_further_back_until_that_step_is_passed(
    tmp_path,
):
    # step 11, and after the rollback step 9, whose samples are 22 and 23
    reports, _, (state, _) = losses_and_reads(tmp_path, bad=range(20, 24))
    assert [step for step, _, _ in reports] == [*range(1, 11), *range(5, 15)]
    assert (state.spike_step, state.rollback_step, state.skipped_samples) == (11, 4, 16)


def test_a_finetuned_run_goes_back_to_its_own_state(tmp_path):
    losses_and_reads(tmp_path / "base", "--train-iters", "4", bad=())
    tuned = ("--load", str(tmp_path / "base"), "--finetune")
    reports, _, (state, _) = losses_and_reads(tmp_path / "tuned", *tuned)
    assert [step for step, _, _ in reports] == [*range(1, 11), *range(9, 15)]
    assert (state.rollback_step, state.skipped_samples) == (8, 6)


def test_the_resume_right_after_a_rollback_skips_the_data_too(tmp_path):
    whole, _, _ = losses_and_reads(tmp_path / "whole")
    # the same, and then cut back to step 8
    losses_and_reads(tmp_path / "cut", "--exit-duration-in-mins", "1000")
    for step in (12, 14):
        path = tmp_path / "cut" / "checkpoints" / f"step-{step:08d}"
        path.rename(path.with_suffix(".superseded-1"))
    resumed, read, (state, _) = losses_and_reads(tmp_path / "cut")
    assert resumed == whole[-6:] and read[0] == 22 and state.skipped_samples == 6


def test_spikes_without_end_end_the_run(tmp_path, logged):
    with pytest.raises(TrainingFault, match="no older checkpoint is left"):
        losses_and_reads(tmp_path, "--save-interval", "9", bad=range(20, 200))
    assert len([line for line in logged if "back to step 9" in line]) == 1


def test_a_spike_that_no_data_causes_goes_further_back_each_time_and_ends_the_run(tmp_path, logged):
    class Spoil(Hook):
        """Makes the loss of step 11 a spike, whatever the data."""

        def after_step(self, run, report) -> None:
            if report.step == 10:
                run.stages[0].final_norm.weight.detach().mul_(-60.0)

    with pytest.raises(
        TrainingFault, match="step 11 is a spike again, after going back from step 11"
    ):
        losses_and_reads(tmp_path, "--save-interval", "3", bad=(), hooks=[Spoil()])
    back = [
        line.split("back to step ")[1].split(",")[0] for line in logged if "back to step" in line
    ]
    assert back == ["9", "6", "3"]


def test_without_a_checkpoint_a_spike_is_a_warning(tmp_path, logged):
    reports, _, (state, _) = losses_and_reads(tmp_path, "--save-interval", "1000")
    assert [step for step, _, _ in reports] == list(range(1, 15)) and state.skipped_samples == 0
    assert any("there is no checkpoint to go back to" in line for line in logged)
