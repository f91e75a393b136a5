"""Start from the weights of a Hugging Face folder (`--pretrained-checkpoint`)."""

from dataclasses import replace
from pathlib import Path

from nanotrain.interop.hf.import_weights import import_weights
from nanotrain.log import get_logger
from nanotrain.train.parts.part import BuiltModel, StepParts
from nanotrain.train.parts.router_balance import router_biases
from nanotrain.train.resume.other_tokenizer import warn_after_import

log = get_logger(__name__)


def load_pretrained(folder: Path, *, model: BuiltModel, parts: StepParts) -> None:
    """Read the main params and expert biases of this rank, and start the all-gather of the parameters.

    Each rank reads its shards alone. Main params get the digits of the files, also where the model params have fewer.

    Raises:
        HuggingFaceError: the files do not have the tensors of the model, or are damaged.
    """
    state, config = model.optimizer.state_tensors(), model.config
    tensors = {box: tensor for box, tensor in state.items() if box.name.startswith("model/")}
    tensors |= router_biases(model.stages)
    wanted = {replace(box, name=box.name.partition("/")[2]): tensor for box, tensor in tensors.items()}
    import_weights(folder, config.model, wanted=wanted)
    model.optimizer.finish_load()
    parts.restored((state | parts.tensors()).keys() - tensors.keys(), checkpoint=None)
    for dp in model.data_parallel:
        dp.start_param_gather()
    warn_after_import(folder, config.data)
    log.info("initial weights from %s", folder)
