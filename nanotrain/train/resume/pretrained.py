"""Start from the weights of a Hugging Face folder (`--pretrained-checkpoint`)."""

from dataclasses import replace
from pathlib import Path

from nanotrain.config.config import Config
from nanotrain.interop.hf.import_weights import import_weights
from nanotrain.log import get_logger
from nanotrain.train.resume.other_tokenizer import warn_after_import
from nanotrain.train.resume.restore import RunParts
from nanotrain.train.routers import router_biases

log = get_logger(__name__)


def load_pretrained(folder: Path, *, parts: RunParts, config: Config) -> None:
    """Read the main params and expert biases of this rank, and start the all-gather of the parameters.

    Each rank reads its shards alone. Main params get the digits of the files, also where the model params have fewer.

    Raises:
        HuggingFaceError: the files do not have the tensors of the model, or are damaged.
    """
    tensors = {box: tensor for box, tensor in parts.optimizer.state_tensors().items() if box.name.startswith("model/")}
    tensors |= router_biases(parts.stages)
    wanted = {replace(box, name=box.name.partition("/")[2]): tensor for box, tensor in tensors.items()}
    import_weights(folder, config.model, wanted=wanted)
    parts.optimizer.finish_load()
    parts.optimizer.average.restart()
    for dp in parts.data_parallel:
        dp.start_param_gather()
    warn_after_import(folder, config.data)
    log.info("initial weights from %s", folder)
