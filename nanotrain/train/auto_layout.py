"""Settings that the planner chooses before the plan of a run.

    with_planned_settings   both of them
    with_auto_layout        the layout, with `--auto-layout`
    with_expert_overlap     on GPUs the default of `--overlap-moe-expert-parallel-comm`

    settings of the command line, ranks, memory of the device --planner.search--> layout
    the same run folder on as many ranks                      --config.yaml-----> layout

Every rank searches on its own: the result follows from the configuration, the number of ranks, and
the name and the total memory of the device. `require_same_start` compares it. The GPU is a row of
the planner by the name that the driver reports. Ranks on a CPU share the memory of their machine,
and their speed is that of the row `cpu`.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import yaml

from nanotrain.comm.device import device_name
from nanotrain.config.config import Config
from nanotrain.config.rules.check import check_groups, check_layout, validate_for_world
from nanotrain.config.rules.unused import reset_unused
from nanotrain.config.schema import ENTRIES, KEYS, unnest, value_of, with_values
from nanotrain.errors import ConfigError, ErrorCollector, NanotrainError
from nanotrain.log import get_logger
from nanotrain.planner.expert_overlap import KEY, decide_expert_overlap
from nanotrain.planner.hardware import GPU, gpu_of
from nanotrain.planner.screen import layout_text
from nanotrain.planner.search import NAMES, TIE, Search, search
from nanotrain.quantities import count_of
from nanotrain.runs.folder import RunFolder
from nanotrain.train.checks import Start
from nanotrain.train.run import RunInputs
from nanotrain.untrusted import read_file

log = get_logger(__name__)

LAYOUT = tuple(ENTRIES[name].key for name in NAMES)  # keys of what the search chooses


def with_planned_settings(
    config: Config, inputs: RunInputs, *, start: Start, explicit: frozenset[str]
) -> tuple[Config, RunInputs]:
    """The configuration with every setting that it leaves to the planner, and its origins.

    Arguments and errors as for `with_auto_layout`.
    """
    if config.parallel.auto_layout:
        config, inputs = with_auto_layout(config, inputs, start=start, explicit=explicit)
    if config.parallel.may_overlap_experts and start.device.type == "cuda":
        config, inputs = with_expert_overlap(config, inputs, start=start)
    return config, inputs


def with_auto_layout(
    config: Config, inputs: RunInputs, *, start: Start, explicit: frozenset[str]
) -> tuple[Config, RunInputs]:
    """The configuration with the current or fastest layout, and inputs that record its origins.

    Args:
        config: the configuration with the vocabulary size set.
        inputs: open inputs of the run.
        start: ranks and device.
        explicit: keys set on the command line, which stay as they are.

    Raises:
        ConfigError: no layout can be formed, none fits, or the planner does not know the GPU.
    """
    world_size = start.launch.world_size
    saved = saved_layout(inputs.folder)
    chosen = None
    if saved is not None and saved.num_ranks == world_size:
        chosen = _with_saved_layout(config, saved, explicit=explicit)
    text = f"keeps that of the run, on {count_of(world_size, 'rank')} as before"
    if chosen is None:
        chosen, text = _search(config, start, explicit=explicit)
        if saved is not None and saved.settings:
            ranks = count_of(saved.num_ranks, "rank")
            text += f"; it replaces that of the run so far, on {ranks}"
    log.info("--auto-layout %s", text)
    check_groups(chosen, "layout", "start", start.device.type)
    origins = dict(inputs.origins)
    for key in KEYS:
        if value_of(chosen, key) != value_of(config, key):
            origins[key] = "--auto-layout"
    return chosen, replace(inputs, origins=origins)


def with_expert_overlap(
    config: Config, inputs: RunInputs, *, start: Start
) -> tuple[Config, RunInputs]:
    """The configuration with the setting decided, and inputs that record its origin.

    Every rank decides on its own, from the same configuration and kind of device. One line says
    what was decided; with a GPU that the planner does not know the setting is off.
    """
    try:
        gpu = planned_gpu(start)
    except ConfigError as error:
        log.info("overlap of tokens on their way: off, %s", error)
        return config, inputs
    choice = decide_expert_overlap(config, start.launch.world_size, gpu=gpu)
    if choice.text:
        log.info("overlap of tokens on their way: %s", choice.text)
    origins = dict(inputs.origins)
    if choice.config.parallel.overlap_moe_expert_parallel_comm:
        origins[KEY] = "the plan for this GPU"
    return choice.config, replace(inputs, origins=origins)


@dataclass(frozen=True)
class SavedLayout:
    """The layout that the last start of a run chose."""

    settings: Mapping[str, Any]  # values by key
    num_ranks: int


def saved_layout(folder: RunFolder) -> SavedLayout | None:
    """The layout that the last start of a run chose; None without one."""
    try:
        values = unnest(yaml.safe_load(read_file(folder.path / "config.yaml")))
        num_ranks = int(json.loads(read_file(folder.path / "environment.json"))["world_size"])
    # the first start, or damaged
    except (OSError, ValueError, KeyError, TypeError, RecursionError, yaml.YAMLError):
        return None
    if not values.get("parallel.auto_layout"):
        return None
    return SavedLayout({key: values[key] for key in LAYOUT if key in values}, num_ranks)


def _with_saved_layout(
    config: Config, saved: SavedLayout, *, explicit: frozenset[str]
) -> Config | None:
    """The configuration with a saved layout; None if changed settings do not allow it."""
    settings = saved.settings
    if any(value_of(config, key) != settings[key] for key in explicit.intersection(settings)):
        return None
    try:
        kept = with_values(config, settings)
        check_layout(kept)
        validate_for_world(kept, saved.num_ranks)
    except NanotrainError:
        return None
    return kept


def _search(config: Config, start: Start, *, explicit: frozenset[str]) -> tuple[Config, str]:
    """The configuration with the simplest of the fastest layouts, and a line on it."""
    launch = start.launch
    gpu = planned_gpu(start)
    result = search(
        config,
        launch.world_size,
        gpu=gpu,
        fixed=explicit,
        max_tensor_parallel_size=min(launch.local_world_size, gpu.gpus_per_node),
    )
    best = result.ties[0]  # predictions cannot rank them, so the simplest, as `plan --search`
    chosen, _ = reset_unused(
        best.scenario.config,
        explicit=explicit,
        errors=ErrorCollector(),
        defaults=frozenset(LAYOUT) - explicit,
    )
    text = (
        f"chooses {layout_text(best)}: {best.time.total:.3g} s per step planned, "
        f"the {_rank_of_ties(result)} of {result.num_formed:,} layouts for {gpu.name}"
    )
    return chosen, text


def _rank_of_ties(result: Search) -> str:
    """The rank of the chosen layout among all."""
    if len(result.ties) == 1:
        return "fastest"
    return f"simplest of the {len(result.ties)} within {TIE - 1:.0%} of the fastest"


def planned_gpu(start: Start) -> GPU:
    """The planner's row of the device, with the memory for one rank."""
    gpu = gpu_of(device_name(start.device))
    memory_bytes = start.available
    # all of it: what is free differs between ranks, and `require_memory` checks that
    if start.device.type == "cpu":
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        memory_bytes = total // start.launch.local_world_size
    return replace(gpu, memory_bytes=memory_bytes or gpu.memory_bytes)
