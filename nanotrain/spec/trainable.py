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
EMBEDDING = "embedding.word.weight"
HEAD = "head.weight"  # not in a model whose output layer has the weight of the embedding
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
    sets = [(name, TrainableSet.of(optim, stage=name)) for name in stages]
    require_matches(tuple(sets), shape)
    return TrainableSet.of(optim, stage=stage or stages[0])


def _require_stages(optim: OptimConfig, stages: Sequence[str]) -> None:
    """Check that patterns name stages of the data."""
    for entry in (*optim.freeze, *optim.train_only):
        name, has_stage, pattern = entry.rpartition("=")
        if not has_stage:
            continue
        if not name:
            raise ConfigError(
                f"{entry} has no data stage before the =",
                why="STAGE=PATTERN is for one stage of --data-stages",
                fix=f"write STAGE{entry}, or {pattern} for all stages",
            )
        if stages == [""]:
            raise ConfigError(
                f"{entry} is for the data stage {name}",
                why="--data-stages is unset",
                fix=f"set --data-stages, or write {pattern} alone",
            )
        if name not in stages:
            raise ConfigError(
                f"{entry} is for the data stage {name}, which does not exist",
                why=f"--data-stages has {', '.join(stages)}",
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
def require_matches(sets: tuple[tuple[str, TrainableSet], ...], shape: ModelShape) -> None:
    """Check that every pattern has an effect, and that every stage trains a parameter.

    Args:
        sets: the name of every stage of the data, and its set.
        shape: sizes of the model.

    Raises:
        ConfigError: patterns that match nothing, else stages that train nothing, else patterns
            without effect in any stage; all of one kind in one error.
    """
    names = [spec.name for spec in declare_model(shape)]
    trainable_sets = [trainable for _, trainable in sets]
    for found in (
        _unmatched_patterns(trainable_sets, names),
        _untrained_stages(sets, names),
        _patterns_without_effect(trainable_sets, names),
    ):
        errors = ErrorCollector()
        errors.errors.extend(found)
        errors.raise_errors()


def _unmatched_patterns(
    sets: Iterable[TrainableSet], names: Sequence[str]
) -> Iterator[ConfigError]:
    """Patterns that match no parameter."""
    patterns: dict[tuple[str, str], None] = {}
    for trainable in sets:
        patterns |= dict.fromkeys(("--freeze", pattern) for pattern in trainable.freeze)
        patterns |= dict.fromkeys(("--train-only", pattern) for pattern in trainable.train_only)
    for flag, pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            yield ConfigError(
                f"{flag} {pattern} matches no parameter",
                why=f"the model has {count_of(len(names), 'parameter')}, from {names[0]} to "
                f"{names[-1]}",
                fix=_similar_names(pattern, names),
            )


def _similar_names(pattern: str, names: Sequence[str]) -> str:
    """The cure for a pattern that matches nothing: similar names."""
    if pattern.startswith("head") and HEAD not in names:
        return f"the output layer shares {EMBEDDING}, unless --untie-embeddings-and-output-weights"
    near = _near_patterns(pattern, names)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return "write a name with * for any characters"


def _near_patterns(pattern: str, names: Iterable[str]) -> list[str]:
    """Patterns similar to one that matches nothing: names of any layer, and all names under one."""
    known: dict[str, None] = {}
    for name in names:
        parts = ["*" if part.isdecimal() else part for part in name.split(".")]
        known[".".join(parts)] = None
        for length in range(1, len(parts)):
            known[".".join([*parts[:length], "*"])] = None
    return get_close_matches(pattern, known, n=NUM_SUGGESTED, cutoff=MIN_SIMILARITY)


def _untrained_stages(
    sets: Iterable[tuple[str, TrainableSet]], names: Collection[str]
) -> Iterator[ConfigError]:
    """Stages without a parameter to train."""
    for stage, trainable in sets:
        if any(map(trainable.includes, names)):
            continue
        patterns = [f"--freeze {pattern}" for pattern in trainable.freeze]
        patterns += [f"--train-only {pattern}" for pattern in trainable.train_only]
        where = f" in the data stage {stage}" if stage else ""
        yield ConfigError(
            f"nothing is trained{where}: all {count_of(len(names), 'parameter')} are frozen",
            why=f"by {' '.join(patterns)}",
            fix="leave out one of them" if len(patterns) > 1 else "leave it out",
        )


def _patterns_without_effect(
    sets: Sequence[TrainableSet], names: Sequence[str]
) -> Iterator[ConfigError]:
    """Patterns that change nothing beside the others, in all stages that have them."""
    frozen = [pattern for trainable in sets for pattern in trainable.freeze]
    for pattern in dict.fromkeys(frozen):
        having = [trainable for trainable in sets if pattern in trainable.freeze]
        if not any(_freezes_any(trainable, names, pattern=pattern) for trainable in having):
            yield ConfigError(
                f"--freeze {pattern} has no effect",
                why=f"--train-only {' '.join(having[0].train_only)} freezes all that it matches",
                fix="leave it out",
            )
    chosen = [pattern for trainable in sets for pattern in trainable.train_only]
    for pattern in dict.fromkeys(chosen):
        having = [trainable for trainable in sets if pattern in trainable.train_only]
        if not any(_trains_any(trainable, names, pattern=pattern) for trainable in having):
            yield ConfigError(
                f"--train-only {pattern} and --freeze contradict each other",
                why=f"--freeze {' '.join(having[0].freeze)} freezes all that it matches",
                fix="leave one of them out",
            )


def _freezes_any(trainable: TrainableSet, names: Iterable[str], *, pattern: str) -> bool:
    """Whether a pattern of `freeze` matches a parameter that `train_only` includes."""
    chosen = TrainableSet(train_only=trainable.train_only)
    return any(chosen.includes(name) for name in names if fnmatchcase(name, pattern))


def _trains_any(trainable: TrainableSet, names: Iterable[str], *, pattern: str) -> bool:
    """Whether a pattern of `train_only` matches a parameter that is trained."""
    return any(trainable.includes(name) for name in names if fnmatchcase(name, pattern))
