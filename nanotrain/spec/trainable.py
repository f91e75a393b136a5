"""The parameters that are trained, chosen by patterns of their names: `--train-only`, `--freeze`.

    TrainableSet      the patterns; all other parameters are frozen
    trained_set       the set of a run, or of a stage of its data
    mark_trainable    parameters with `is_trainable`
    require_matches   check the patterns against the parameters of a model
    first_trained_stage   the pipeline stage at which backwards end

A pattern is that of `fnmatch`: `*` matches any characters, dots too, and `[0-3]` one of a range.
With STAGE= before it, it applies to that stage of `--data-stages` only.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Self

from nanotrain.config.config import Config, OptimConfig
from nanotrain.config.data_stages import read_stages
from nanotrain.config.suggest import did_you_mean
from nanotrain.errors import ConfigError, ErrorCollector
from nanotrain.quantities import count_of
from nanotrain.spec.declaration import Declaration, Specs
from nanotrain.spec.parameters import declare_model, declare_stage
from nanotrain.spec.shape import ModelShape
from nanotrain.spec.stages import StageSpec

NUM_SUGGESTED = 3
MIN_SIMILARITY = 0.5  # share of equal characters, as difflib counts them


@dataclass(frozen=True)
class TrainableSet:
    """Patterns of parameter names.

    >>> TrainableSet(freeze=("embedding.*",)).includes("embedding.word.weight")
    False
    >>> TrainableSet(train_only=("layers.*.attention.*",)).includes("layers.3.attention.q.weight")
    True
    """

    freeze: tuple[str, ...] = ()  # parameters that are not trained
    train_only: tuple[str, ...] = ()  # the only ones that may be trained; empty: all

    @classmethod
    def of(cls, optim: OptimConfig, *, stage: str = "") -> Self:
        """The set of a stage of the data; without one the patterns for all stages.

        >>> optim = OptimConfig(freeze=["head.*", "anneal=embedding.*"])
        >>> TrainableSet.of(optim).freeze, TrainableSet.of(optim, stage="anneal").freeze
        (('head.*',), ('head.*', 'embedding.*'))
        """
        return cls(
            tuple(_stage_patterns(optim.freeze, stage)),
            tuple(_stage_patterns(optim.train_only, stage)),
        )

    @property
    def is_everything(self) -> bool:
        """Whether all parameters are trained."""
        return not self.freeze and not self.train_only

    def includes(self, name: str) -> bool:
        """Whether a parameter is trained."""
        if self.train_only and not _matches_any(name, self.train_only):
            return False
        return not _matches_any(name, self.freeze)


def _stage_patterns(entries: Iterable[str], stage: str) -> Iterator[str]:
    """The patterns that apply to a stage."""
    for entry in entries:
        name, has_stage, pattern = entry.rpartition("=")
        if not has_stage or name == stage:
            yield pattern


def trained_set(config: Config, shape: ModelShape, *, stage: str = "") -> TrainableSet:
    """The parameters that are trained in a stage of the data, by default the first one.

    Raises:
        ConfigError: mistakes in the patterns of any stage.
    """
    optim = config.optim
    if not optim.freeze and not optim.train_only:
        return TrainableSet()
    stages = [read.name for read in read_stages(config.data.stages)] or [""]
    _require_stages(optim, stages)
    for name in stages:
        require_matches(TrainableSet.of(optim, stage=name), shape)
    return TrainableSet.of(optim, stage=stage or stages[0])


def _require_stages(optim: OptimConfig, stages: Sequence[str]) -> None:
    """Check that patterns name stages of the data."""
    for entry in (*optim.freeze, *optim.train_only):
        name, has_stage, _ = entry.rpartition("=")
        if has_stage and name not in stages:
            known = ", ".join(stages)
            raise ConfigError(
                f"{entry} is for the data stage {name}, which does not exist",
                why=f"--data-stages has {known}" if known else "--data-stages is unset",
                fix=did_you_mean(name, stages, listed_by="--data-stages"),
            )


def _matches_any(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def mark_trainable(specs: Specs, trainable: TrainableSet) -> Specs:
    """The parameters of a stage, frozen where the set does not include them."""
    if trainable.is_everything:
        return specs
    return tuple(replace(spec, is_trainable=trainable.includes(spec.name)) for spec in specs)


@lru_cache(maxsize=64)
def first_trained_stage(
    trainable: TrainableSet, shape: ModelShape, *, stages: tuple[StageSpec, ...]
) -> int:
    """The first pipeline stage with a parameter that is trained; no earlier one has a backward."""
    if trainable.is_everything:
        return 0
    declaration = Declaration(shape, "fp32")
    for stage in stages:
        specs = declare_stage(declaration, stage)
        if any(trainable.includes(spec.name) for spec in specs):
            return stage.index
    raise AssertionError("`require_matches` found parameters to train")


@lru_cache(maxsize=64)  # a search plans thousands of layouts of one model
def require_matches(trainable: TrainableSet, shape: ModelShape) -> None:
    """Check that every pattern has an effect, and that a parameter is trained.

    Raises:
        ConfigError: a pattern that matches nothing, patterns that contradict each other, or
            nothing left to train; all in one error.
    """
    if trainable.is_everything:
        return
    names = [spec.name for spec in declare_model(shape)]
    errors = ErrorCollector()
    errors.errors.extend(_unmatched(trainable, names))
    errors.raise_errors()
    errors.errors.extend(_contradictions(trainable, names))
    errors.raise_errors()


def _unmatched(trainable: TrainableSet, names: Sequence[str]) -> Iterator[ConfigError]:
    """Patterns that match no parameter."""
    flags = {"--freeze": trainable.freeze, "--train-only": trainable.train_only}
    for flag, patterns in flags.items():
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                near = _near_patterns(pattern, names)
                yield ConfigError(
                    f"{flag} {pattern} matches no parameter",
                    why=f"the model has {count_of(len(names), 'parameter')}, from {names[0]} to "
                    f"{names[-1]}",
                    fix=f"did you mean {' or '.join(near)}?"
                    if near
                    else "write a name with * for any characters",
                )


def _near_patterns(pattern: str, names: Iterable[str]) -> list[str]:
    """Patterns similar to one that matches nothing: names of any layer, and all names under one."""
    known: dict[str, None] = {}
    for name in names:
        parts = ["*" if part.isdecimal() else part for part in name.split(".")]
        known[".".join(parts)] = None
        for length in range(1, len(parts)):
            known[".".join([*parts[:length], "*"])] = None
    return get_close_matches(pattern, known, n=NUM_SUGGESTED, cutoff=MIN_SIMILARITY)


def _contradictions(trainable: TrainableSet, names: Collection[str]) -> Iterator[ConfigError]:
    """Patterns without effect beside the others; patterns that leave nothing to train."""
    if not any(map(trainable.includes, names)):
        patterns = [f"--freeze {pattern}" for pattern in trainable.freeze]
        patterns += [f"--train-only {pattern}" for pattern in trainable.train_only]
        yield ConfigError(
            f"nothing is trained: all {count_of(len(names), 'parameter')} are frozen",
            why=f"by {' '.join(patterns)}",
            fix="leave out one of them",
        )
        return
    if not trainable.train_only:
        return
    chosen = [name for name in names if _matches_any(name, trainable.train_only)]
    for pattern in trainable.freeze:
        if not any(fnmatchcase(name, pattern) for name in chosen):
            yield ConfigError(
                f"--freeze {pattern} has no effect",
                why=f"--train-only {' '.join(trainable.train_only)} freezes all that it matches",
                fix="leave it out",
            )
    for pattern in trainable.train_only:
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not any(map(trainable.includes, matched)):
            yield ConfigError(
                f"--train-only {pattern} and --freeze contradict each other",
                why=f"--freeze {' '.join(trainable.freeze)} freezes all that it matches",
                fix="leave one of them out",
            )
