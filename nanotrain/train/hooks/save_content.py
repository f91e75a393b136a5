"""What a save writes besides the step: the tensors of this rank, counters and records."""

import math
from dataclasses import asdict
from functools import partial
from typing import Any

from torch import Tensor

from nanotrain.checkpoint.all_ranks import run_on_first
from nanotrain.checkpoint.checkpointer import Content
from nanotrain.checkpoint.compatibility import kind_of
from nanotrain.checkpoint.store import read_manifest
from nanotrain.config.schema import to_dict
from nanotrain.data.build import fingerprints
from nanotrain.data.mix import recorded_stages
from nanotrain.data.recorded_data import DataRecord, record_of, valid_ranges
from nanotrain.data.same_tokenizer import definition_hash
from nanotrain.runs.metrics_file import Sealer
from nanotrain.spec.boxes import TensorBox
from nanotrain.train.run import Run
from nanotrain.train.step_report import StepReport


class SaveContent:
    """The fields of the manifests of a run."""

    def __init__(self) -> None:
        self._sealer: Sealer | None = None  # on the first rank, from the first save on
        self._tokenizer: str | None = None  # hash of the tokenizer in the run folder

    def of(self, run: Run, report: StepReport | None) -> Content:
        """Arguments of a save besides step and tensors. Collective.

        Args:
            run: run, after a step.
            report: report of that step, for which the host waits; None if it does not count, or is
                that of an earlier start.
        """
        topology = run.context.topology
        objects: dict[str, Any] = {
            "train": run.state.to_dict(),
            "optimizer": run.optimizer.state_dict(),
            "last_step": {"loss": _finite_loss(report)},
            "corpora": fingerprints(run.dataset),
        }
        if not run.config.data.mock_data:
            objects["data"] = _data_record(run).to_json()
        objects |= run_on_first(run.context.control, partial(self._facts_of_files, run))
        if report is None:
            objects |= run_on_first(run.context.control, partial(_last_step_of_start, run))
        return {
            "objects": objects,
            "config": to_dict(run.config),
            "topology": {"world_size": topology.world_size, **asdict(topology.dense)},
        }

    def _facts_of_files(self, run: Run) -> dict[str, Any]:
        """Changes of the blend, tokenizer and metrics in the run folder, on the first rank.

        Other ranks may not see the folder, and the manifests of all ranks must agree.
        """
        if self._sealer is None:
            self._sealer = Sealer(run.folder.metrics)
            self._tokenizer = definition_hash(run.folder.tokenizer)
        facts: dict[str, Any] = {}
        mixed = recorded_stages(run.folder.path, origin=_first_sample(run))
        if mixed:
            facts["stages"] = mixed
        seal = self._sealer.seal()
        if seal is not None:
            facts["metrics"] = asdict(seal)
        if self._tokenizer is not None:
            facts["tokenizer_sha256"] = self._tokenizer
        return facts


def _finite_loss(report: StepReport | None) -> float | None:
    """The loss of a step, for which the host waits here; None if it is not finite."""
    loss = math.nan if report is None else report.output.loss
    return loss if math.isfinite(loss) else None


def _last_step_of_start(run: Run) -> dict[str, Any]:
    """What the checkpoint that the run goes on from has of its last step, if it is the present one.

    It is saved again where only the memory of the hosts has it.
    """
    path = run.inputs.checkpoint
    if path is None or run.inputs.memory is None or not run.inputs.memory.is_start_newer:
        return {}
    manifest = read_manifest(path)
    if manifest.step != run.state.step or "last_step" not in manifest.objects:
        return {}
    return {"last_step": manifest.objects["last_step"]}


def _first_sample(run: Run) -> int:
    """The first sample of the data that the run reads now."""
    origin = run.inputs.data_origin
    return 0 if origin is None else origin.sample


def _data_record(run: Run) -> DataRecord:
    """How far the run has read its data."""
    return record_of(
        run.batches.dataset,
        sample=run.state.consumed_samples + run.state.skipped_samples,
        settings=run.inputs.data_settings,
        valid=valid_ranges(run.inputs.datasets),
        origin=run.inputs.data_origin,
    )


def tensors_to_save(run: Run) -> dict[TensorBox, Tensor]:
    """The tensors that this rank saves."""
    tensors = run.optimizer.tensors_to_save() | run.parts.tensors_to_save()
    if run.config.checkpoint.save_optim:
        return tensors
    return {box: tensor for box, tensor in tensors.items() if kind_of(box.name) != "optimizer"}
