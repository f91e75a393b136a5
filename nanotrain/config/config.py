"""The configuration: one frozen dataclass per section, with strings and numbers only.

model_fields.py   fields of the model section; model.py   sizes and kinds of layers that follow
layer_kinds.py    nested sections of the model
parallel.py       the layout and activation memory
precision.py      data types, fp8
optim.py, data.py, checkpoint.py, train.py   the sections of these names

A field's flag is `--` and its name in kebab case; fields of `model.moe` have the prefix `--moe-`.
Flags are unique over all sections. The docstring under a field is its help. `rules/` holds the
rules that span several fields, `load.py` fills the sections.
"""

from dataclasses import dataclass

from nanotrain.config.checkpoint import CheckpointConfig
from nanotrain.config.data import DataConfig
from nanotrain.config.model import ModelConfig
from nanotrain.config.optim import OptimConfig
from nanotrain.config.option import section
from nanotrain.config.parallel import MemoryConfig, ParallelConfig
from nanotrain.config.precision import Fp8Config, PrecisionConfig
from nanotrain.config.train import TrainConfig

__all__ = [
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "Fp8Config",
    "MemoryConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "TrainConfig",
]


@dataclass(frozen=True)
class Config:
    """The whole configuration; a component takes only the sections that it needs."""

    model: ModelConfig = section(ModelConfig)
    parallel: ParallelConfig = section(ParallelConfig)
    memory: MemoryConfig = section(MemoryConfig)
    precision: PrecisionConfig = section(PrecisionConfig)
    optim: OptimConfig = section(OptimConfig)
    data: DataConfig = section(DataConfig)
    checkpoint: CheckpointConfig = section(CheckpointConfig)
    train: TrainConfig = section(TrainConfig)

    @property
    def is_model_known(self) -> bool:
        """Whether the model section needs no checkpoint and no Hugging Face folder."""
        checkpoint = self.checkpoint
        return checkpoint.pretrained_checkpoint is None and not checkpoint.use_checkpoint_args

    @property
    def validates(self) -> bool:
        """Whether the run validates: some steps do, and `split` leaves documents for them.

        >>> Config().validates, Config(data=DataConfig(split="100,0,0")).validates
        (True, False)
        """
        if self.train.eval_interval == 0 or self.train.eval_iters == 0:
            return False
        data = self.data
        if data.mock_data or data.train_data_path or data.valid_data_path:
            return True
        shares = data.split.split(",")
        return len(shares) > 1 and float(shares[1]) > 0

    @property
    def evaluates(self) -> bool:
        """Whether the run validates or scores tasks."""
        return self.validates or bool(self.train.eval_tasks and self.train.eval_interval)
