"""`--freeze`, `--train-only`: a resume that trains other parameters than the checkpoint.

Parameters that were frozen have no optimizer state in it, which begins at zero. The state of
parameters that are frozen now is left out.
"""

from collections.abc import Collection, Iterator
from pathlib import Path

from nanotrain.checkpoint.compatibility import kind_of
from nanotrain.checkpoint.manifest import Manifest
from nanotrain.log import get_logger
from nanotrain.optim.trained_sets import TrainedSets
from nanotrain.quantities import count_of
from nanotrain.spec.boxes import TensorBox
from nanotrain.spec.parameters import declare_model
from nanotrain.spec.params import ParamSpec
from nanotrain.spec.trainable import TrainableSet
from nanotrain.train.parts.part import BuiltModel, StepPart
from nanotrain.untrusted import object_of

log = get_logger(__name__)
TRAINED_KINDS = {"optimizer", "ema"}  # kinds of tensors that frozen parameters do not have


class TrainedParams(StepPart):
    """Reads a checkpoint in which other parameters were trained, and logs the change."""

    def __init__(self, model: BuiltModel) -> None:
        self._now = model.plan.trainable
        self._specs = declare_model(model.plan.shape)
        self._before = self._now  # the set of the checkpoint that is read

    def missing(
        self, targets: Collection[TensorBox], manifest: Manifest, *, weights_alone: bool
    ) -> Collection[TensorBox]:
        """State of the parameters that the checkpoint has frozen."""
        self._before = self._now if weights_alone else _trained_set(manifest)
        newly_trained = {spec.name for spec in self._newly_trained(self._before, self._now)}
        return [box for box in targets if _param_with_state(box.name) in newly_trained]

    def unread(self, manifest: Manifest) -> Collection[str]:
        """State of the parameters that are frozen now."""
        names = []
        for name in manifest.tensors:
            param = _param_with_state(name)
            if param is not None and not self._now.includes(param):
                names.append(name)
        return names

    def restored(self, missing: Collection[TensorBox], *, checkpoint: Path | None) -> None:
        """Log the parameters whose training begins or ends here."""
        if self.changes:
            log.info("%s", self.changes)

    @property
    def changes(self) -> str:
        """The parameters whose training began or ended with the checkpoint; empty without any."""
        texts = []
        newly_trained = list(self._newly_trained(self._before, self._now))
        if newly_trained:
            texts.append(f"{_count(newly_trained)} newly trained, with optimizer state of zeros")
        newly_frozen = list(self._newly_trained(self._now, self._before))
        if newly_frozen:
            texts.append(f"{_count(newly_frozen)} frozen from here on, without optimizer state")
        return "; ".join(texts)

    def _newly_trained(self, before: TrainableSet, now: TrainableSet) -> Iterator[ParamSpec]:
        """The parameters that are trained now and were not before."""
        if before == now:
            return
        for spec in self._specs:
            if now.includes(spec.name) and not before.includes(spec.name):
                yield spec


def _trained_set(manifest: Manifest) -> TrainableSet:
    """The set of the run that wrote a checkpoint; all parameters where it has none."""
    saved = manifest.objects.get("optimizer")
    try:
        return TrainedSets.from_json(object_of(saved, "objects.optimizer")).last
    except ValueError:  # reading the counters reports it
        return TrainableSet()


def _param_with_state(name: str) -> str | None:
    """The parameter of a tensor of optimizer state or of the average; None for other tensors.

    >>> _param_with_state("optimizer/exp_avg/head.weight"), _param_with_state("model/head.weight")
    ('head.weight', None)
    """
    return name.rpartition("/")[2] if kind_of(name) in TRAINED_KINDS else None


def _count(specs: Collection[ParamSpec]) -> str:
    numel = sum(spec.numel for spec in specs)
    return f"{count_of(len(specs), 'parameter')} of {count_of(numel, 'element')}"
