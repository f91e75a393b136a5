"""Global batch size and sequence length as functions of the consumed samples.

    --global-batch-size                              constant
    --rampup-batch-size START INCREMENT SAMPLES      equal increments over the first samples
    --step-batch-size-schedule THRESHOLD:SIZE ...    a size from each threshold of tokens on
    --step-seq-length-schedule THRESHOLD:LENGTH ...  lengths that ascend to seq_length

Nothing else is stored: a run that resumes has consumed some number of samples, which gives the size
of its next batch. Source: Megatron-LM, `num_microbatches_calculator.py`.

    consumed tokens    0 ............... 10B .............. 40B ......
    length             1024              2048               4096 = seq_length
    a sample           |--|--|--|--|     |-----|-----|      |-----------|

A sample always has seq_length tokens. While the length is shorter, it is split into consecutive
sequences of that length, each with positions from 0 and without attention to the others. So the
samples, their order, the tokens of a step and the learning rate equal those of a run without the
schedule, and every token is read once.

Source: Li et al. 2022, "The Stability-Efficiency Dilemma" (sequence length warmup). There a batch
keeps its number of sequences, and the rest of every sequence is not read.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from nanotrain.config.config import Config, TrainConfig
from nanotrain.config.notation import read_number
from nanotrain.config.option import flag_of
from nanotrain.errors import ConfigError
from nanotrain.quantities import count_of, round_up

# limits of a ramp-up, far beyond any run
MAX_SAMPLES = 10**9
MAX_INCREMENTS = 10_000


@dataclass(frozen=True)
class RampUp:
    """Equal increments over the first `samples` samples.

    >>> ramp = RampUp(start=2, increment=2, samples=12, final=8)
    >>> [ramp.size_at(consumed) for consumed in (0, 3, 4, 8, 12, 13)]
    [2, 2, 4, 6, 8, 8]
    """

    start: int  # samples of the first batch
    increment: int  # samples by which the batch grows
    samples: int  # consumed samples at which the batch reaches its final size
    final: int  # the global batch size from then on

    def size_at(self, consumed_samples: int) -> int:
        """Size of the batch that starts at `consumed_samples`."""
        if consumed_samples > self.samples:
            return self.final
        # in floating point, as in Megatron-LM, so that every batch has the size that it has there
        num_increments = (self.final - self.start) // self.increment
        samples_per_increment = self.samples / num_increments
        growth = int(consumed_samples / samples_per_increment) * self.increment
        return min(self.final, self.start + growth)

    @property
    def last_change(self) -> int:
        """Consumed samples after which every batch has the final size."""
        return self.samples

    @property
    def sizes(self) -> range:
        """Every size, ascending."""
        return range(self.start, self.final + 1, self.increment)


@dataclass(frozen=True)
class Steps:
    """A size from each threshold on.

    >>> Steps(((0, 4), (100, 8))).size_at(100)
    8
    """

    thresholds: tuple[tuple[int, int], ...]  # (consumed samples, size), ascending from 0

    def size_at(self, consumed_samples: int) -> int:
        """Size of the batch that starts at `consumed_samples`."""
        return next(
            size for threshold, size in reversed(self.thresholds) if consumed_samples >= threshold
        )

    @property
    def last_change(self) -> int:
        """Consumed samples after which every batch has the final size."""
        return self.thresholds[-1][0] - 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """Every size, in order."""
        return tuple(size for _, size in self.thresholds)

    @property
    def final(self) -> int:
        """The size after the last threshold."""
        return self.thresholds[-1][1]


BatchSchedule = RampUp | Steps


def batch_schedule(config: Config) -> BatchSchedule | None:
    """The schedule of the batch size; None where it is constant.

    Raises:
        ConfigError: a schedule that cannot be read or does not fit the global batch size.
    """
    train = config.train
    if train.step_batch_size_schedule:
        steps = read_steps(train.step_batch_size_schedule, config.data.seq_length)
        require_no_other_size(train, steps)
        return steps
    if train.rampup_batch_size:
        return read_ramp_up(train.rampup_batch_size, train.global_batch_size)
    return None


def require_no_other_size(train: TrainConfig, steps: Steps) -> None:
    """Check that nothing but the schedule gives the batch size.

    Raises:
        ConfigError: a ramp-up, or another global batch size.
    """
    if train.rampup_batch_size:
        other = "rampup_batch_size"
        fix = "leave out --rampup-batch-size"
    elif train.global_batch_size not in (None, steps.final):
        other = f"global_batch_size {train.global_batch_size}"
        fix = f"set --global-batch-size {steps.final}"
    else:
        return
    end = count_of(steps.final, "sample")
    raise ConfigError(
        f"step_batch_size_schedule ends at {end}, and {other} is set",
        why="the schedule gives the size of every batch",
        fix=f"{fix}, or leave out --step-batch-size-schedule",
    )


def read_ramp_up(values: list[int], final: int | None) -> RampUp:
    """The ramp-up of START INCREMENT SAMPLES to the global batch size.

    Raises:
        ConfigError: not three numbers, or steps that do not end at the global batch size.

    >>> read_ramp_up([16, 8, 1000], 64).sizes
    range(16, 65, 8)
    """
    what = f"rampup_batch_size is {' '.join(map(str, values))}"
    if len(values) != 3:
        raise ConfigError(
            what,
            why="it takes three numbers: first size, increment, samples of the ramp-up",
            fix="write --rampup-batch-size START INCREMENT SAMPLES",
        )
    if final is None:
        raise ConfigError(
            f"{what} and ends nowhere",
            why="global_batch_size is unset",
            fix="set --global-batch-size",
        )
    start, increment, samples = values
    if start >= final or (final - start) % increment:
        fix = "lower the first size and the increment"
        if final > increment:
            fitting_start = final % increment or increment
            fix = f"set --rampup-batch-size {fitting_start} {increment} {samples}"
        raise ConfigError(
            f"{what}, which does not end at global_batch_size {final}",
            why=f"from {start} on by {increment} it must reach {final} in one or more increments",
            fix=fix,
        )
    if samples > MAX_SAMPLES or (final - start) // increment > MAX_INCREMENTS:
        raise ConfigError(
            what,
            why=f"it has at most {MAX_INCREMENTS:,} increments over {MAX_SAMPLES:,} samples",
            fix="lower SAMPLES or raise INCREMENT",
        )
    return RampUp(start, increment, samples, final)


def read_steps(
    texts: list[str], seq_length: int, *, option: str = "step_batch_size_schedule"
) -> Steps:
    """The steps of THRESHOLD:SIZE pairs, thresholds in tokens.

    Args:
        texts: the pairs, separated by spaces or commas.
        seq_length: tokens of a sample.
        option: name of the setting, for messages.

    Raises:
        ConfigError: another form, or thresholds that do not begin at 0 and ascend.

    >>> read_steps(["0:8", "2K:16"], seq_length=100).thresholds
    ((0, 8), (20, 16))
    """
    pairs: list[tuple[int, int]] = []
    for text in " ".join(texts).replace(",", " ").split():
        threshold, colon, size = text.partition(":")
        tokens = read_number(threshold)
        samples = read_number(size)
        if not colon or tokens is None or not samples:
            raise ConfigError(
                f"{option} has {text!r}",
                why="each entry is TOKENS:SIZE, the size above 0",
                fix=f"write {flag_of(option)} 0:768 250B:1536 with suffixes K, M, B or T",
            )
        pairs.append((tokens // seq_length, samples))
    pairs.sort(key=lambda pair: pair[0])
    starts = [threshold for threshold, _ in pairs]
    if not starts or starts[0] != 0 or len(set(starts)) < len(starts):
        raise ConfigError(
            f"{option} begins at {', '.join(map(str, starts)) or 'no'} samples",
            why=f"its thresholds in tokens / seq_length {seq_length} must begin at 0 and differ",
            fix="begin it with 0:SIZE and name every threshold once",
        )
    return Steps(tuple(pairs))


def batch_sizes(schedule: BatchSchedule, consumed_samples: int = 0) -> Iterator[int]:
    """The sizes of the batches from `consumed_samples` on; an infinite iterator."""
    while True:
        size = schedule.size_at(consumed_samples)
        yield size
        consumed_samples += size


def samples_of_steps(schedule: BatchSchedule, steps: int, *, consumed: int = 0) -> int:
    """Samples consumed after `steps` batches, the first of which starts at `consumed`.

    >>> samples_of_steps(RampUp(start=2, increment=2, samples=12, final=8), 5)
    22
    """
    while steps > 0 and consumed <= schedule.last_change:
        consumed += schedule.size_at(consumed)
        steps -= 1
    return consumed + steps * schedule.final


def steps_of_samples(schedule: BatchSchedule, samples: int) -> int:
    """Steps of a run of `samples` samples, counted as Megatron-LM does.

    After a ramp-up the last partial batch is left out. With steps the last batch may pass the end.

    >>> steps_of_samples(RampUp(start=2, increment=2, samples=12, final=8), 36)
    6
    """
    is_ramp = isinstance(schedule, RampUp)
    last_start = min(schedule.last_change, samples if is_ramp else samples - 1)
    consumed = 0
    steps = 0
    while consumed <= last_start:
        consumed += schedule.size_at(consumed)
        steps += 1
    rest = max(0, samples - consumed)
    if is_ramp:
        return steps + rest // schedule.final
    return steps + -(-rest // schedule.final)


def global_batch_size(train: TrainConfig, dp: int) -> int:
    """Samples per optimizer step over all ranks; with a schedule its last size.

    Unset it is one microbatch per rank.

    >>> global_batch_size(TrainConfig(micro_batch_size=4), 2)
    8
    """
    if train.step_batch_size_schedule:
        return read_steps(train.step_batch_size_schedule, 1).final
    return train.global_batch_size or train.micro_batch_size * dp


def with_batch_size(config: Config, size: int) -> Config:
    """The configuration with one global batch size for all steps."""
    train = replace(
        config.train, global_batch_size=size, rampup_batch_size=[], step_batch_size_schedule=[]
    )
    return replace(config, train=train)


def num_microbatches(train: TrainConfig, dp: int) -> int:
    """Microbatches per rank and optimizer step, microbatches of padding included.

    Raises:
        ConfigError: the microbatch size does not divide the global batch, or there are fewer
            microbatches than ranks.

    >>> train = TrainConfig(micro_batch_size=2, global_batch_size=24)
    >>> num_microbatches(train, 4), num_microbatches(train, 5)
    (3, 3)
    """
    batch_size = global_batch_size(train, dp)
    per_pass = train.micro_batch_size * dp  # samples of one microbatch on every rank
    batch = f"a global batch of {count_of(batch_size, 'sample')}"
    if batch_size % train.micro_batch_size:
        fitting = round_up(batch_size, per_pass)
        raise ConfigError(
            f"{batch} cannot be split into microbatches",
            why=f"micro_batch_size {train.micro_batch_size} must divide it",
            fix=f"set --global-batch-size {fitting} or another --micro-batch-size",
        )
    if batch_size < per_pass:
        other = "another --micro-batch-size"
        if batch_size < dp:
            other = f"run on fewer ranks: data-parallel size {batch_size} or less"
        raise ConfigError(
            f"{batch} has less than one microbatch per rank",
            why=f"micro_batch_size {train.micro_batch_size} x data-parallel size {dp} = {per_pass}",
            fix=f"set --global-batch-size {per_pass} or {other}",
        )
    return -(-batch_size // per_pass)


LENGTH_OPTION = "step_seq_length_schedule"
LENGTH_FLAG = "--step-seq-length-schedule"


def length_schedule(config: Config) -> Steps | None:
    """The schedule of the sequence length; None where it is always seq_length.

    Raises:
        ConfigError: a schedule that cannot be read, or lengths that do not ascend to seq_length and
            divide it.
    """
    texts = config.train.step_seq_length_schedule
    seq_length = config.data.seq_length
    if not texts:
        return None
    steps = read_steps(texts, seq_length, option=LENGTH_OPTION)
    lengths = steps.sizes
    if steps.final != seq_length:
        raise ConfigError(
            f"{LENGTH_OPTION} ends at length {steps.final} and seq_length is {seq_length}",
            why="a sample is seq_length tokens, which shorter lengths split",
            fix=f"set --seq-length {max(lengths)}, or end {LENGTH_FLAG} with the length "
            f"{seq_length}",
        )
    if any(after <= before for before, after in pairwise(lengths)):
        raise ConfigError(
            f"the lengths of {LENGTH_OPTION} are {' '.join(map(str, lengths))}",
            why="each length must be above the previous one",
            fix="order them by length, with ascending numbers of tokens",
        )
    uneven = [length for length in lengths if seq_length % length]
    if uneven:
        fitting = [str(seq_length // parts) for parts in (8, 4, 2) if seq_length % parts == 0]
        fix = f"use divisors of {seq_length}"
        if fitting:
            fix = f"use lengths such as {' '.join(fitting)}"
        raise ConfigError(
            f"{LENGTH_OPTION} has the length {uneven[0]}, which does not divide seq_length "
            f"{seq_length}",
            why="a sample is split into sequences of one length",
            fix=fix,
        )
    return steps
