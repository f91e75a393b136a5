"""The section of checkpoints."""

from dataclasses import dataclass

from nanotrain.config.option import at_least, option


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving and loading of checkpoints."""

    save: bool = option(True)
    """write checkpoints into the run folder"""

    save_interval: int = option(500, check=at_least(0))
    """steps between checkpoints; 0: only at the end"""

    keep_last: int = option(3, check=at_least(0))
    """number of checkpoints to keep; 0: all"""

    save_retain_interval: int | None = option(None, check=at_least(1))
    """also keep the checkpoints at steps that are a multiple of this"""

    average_saves: int | None = option(None, check=at_least(2))
    """after every save write the mean of the weights of this many last checkpoints into the folder
    averages of the run
    """

    async_save: bool = option(False)
    """write checkpoints in the background, from a copy in host memory"""

    memory_checkpoint_interval: int = option(0, check=at_least(0))
    """steps between checkpoints in the memory of the hosts, with a copy on a partner's host, from
    which a restart goes on; 0: none
    """

    memory_checkpoint_dir: str = option("/dev/shm", is_path=True)
    """memory file system of a host for memory_checkpoint_interval"""

    save_optim: bool = option(True)
    """write optimizer state into checkpoints; off: a run goes on from one with --no-load-optim only
    """

    exit_on_save_failure: bool = option(False)
    """end the run where a checkpoint cannot be written; otherwise retry at the next interval"""

    save_fallback_dir: str | None = option(None, is_path=True)
    """folder for the last checkpoint, in a subfolder named like the run, where the run folder
    cannot be written
    """

    staging_dir: str | None = option(None, is_path=True)
    """folder on a fast local disk for a run in object storage: its files, and each checkpoint
    before it is uploaded; unset: runs
    """

    load: str | None = option(None, is_path="or address")
    """step folder, or run folder for its newest checkpoint, to load instead of the run's own
    checkpoint
    """

    finetune: bool = option(False)
    """of the checkpoint of load take only the weights: start at step 0 with new optimizer state"""

    load_optim: bool = option(True)
    """load the optimizer state of a checkpoint; off: only its weights and its step"""

    auto_resume: bool = option(True)
    """resume from the newest complete checkpoint of the run folder"""

    allow_data_changes: bool = option(False)
    """at a resume with other data, go on although samples are read again or left out, or training
    data becomes validation data
    """

    use_checkpoint_args: bool = option(False)
    """take the model from the checkpoint that the run starts from, and seq_length where it is not
    set
    """

    pretrained_checkpoint: str | None = option(None, is_path="or address")
    """Hugging Face folder with the initial weights; its config.json sets the model section"""
