"""Sequence length as a function of the consumed samples: --step-seq-length-schedule TOKENS:LENGTH ...

    consumed tokens    0 ............... 10B .............. 40B ......
    length             1024              2048               4096 = seq_length
    a sample           |--|--|--|--|     |-----|-----|      |-----------|

A sample always has seq_length tokens. While the length is shorter, it is split into consecutive sequences of that
length, each with positions from 0 and without attention to the others. So the samples, their order, the tokens of a
step and the learning rate equal those of a run without the schedule, and every token is read once.

Source: Li et al. 2022, "The Stability-Efficiency Dilemma" (sequence length warmup). There a batch keeps its number of
sequences, and the rest of every sequence is not read.
"""

from nanotrain.config.batch_schedule import Steps, read_steps
from nanotrain.config.config import Config
from nanotrain.errors import ConfigError

OPTION = "step_seq_length_schedule"
FLAG = "--step-seq-length-schedule"


def length_schedule(config: Config) -> Steps | None:
    """The schedule of the sequence length; None where it is always seq_length.

    Raises:
        ConfigError: a schedule that cannot be read, or lengths that do not ascend to seq_length and divide it.
    """
    texts, seq_length = config.train.step_seq_length_schedule, config.data.seq_length
    if not texts:
        return None
    steps = read_steps(texts, seq_length, option=OPTION)
    lengths = steps.sizes
    shown = " ".join(map(str, lengths))
    if steps.final != seq_length:
        raise ConfigError(
            f"{OPTION} ends at length {steps.final} and seq_length is {seq_length}",
            why="a sample is seq_length tokens, which shorter lengths split",
            fix=f"set --seq-length {max(lengths)}, or end {FLAG} with the length {seq_length}",
        )
    if any(after <= before for before, after in zip(lengths, lengths[1:], strict=False)):
        raise ConfigError(
            f"the lengths of {OPTION} are {shown}",
            why="each length must be above the previous one",
            fix="order them by length, with ascending numbers of tokens",
        )
    uneven = [length for length in lengths if seq_length % length]
    if uneven:
        fitting = " ".join(str(seq_length // parts) for parts in (8, 4, 2) if seq_length % parts == 0)
        raise ConfigError(
            f"{OPTION} has the length {uneven[0]}, which does not divide seq_length {seq_length}",
            why="a sample is split into sequences of one length",
            fix=f"use lengths such as {fitting}" if fitting else f"use divisors of {seq_length}",
        )
    return steps
