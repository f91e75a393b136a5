"""Composition of YAML files by Hydra; no other file imports Hydra, but merge.py for its grammar.

compose_files    the values that the chosen files set, by key, and the file of each
config_dir       the folder of built-in files
names_in         the files of a group

The order of precedence, lowest first: `train.yaml`, the chosen files of its groups, the recipe, the
command line. Hydra resolves the defaults lists into the files to merge, in order. They are merged
here, so that each value has its file. Hydra takes 0.4 s, so it is imported where a file is chosen,
and files are resolved and read once, until they are written again.
"""

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import yaml
from omegaconf.errors import OmegaConfBaseException

from nanotrain.config.arguments import FLAGS, choice_of, is_file
from nanotrain.config.command_line import CommandLine
from nanotrain.config.recipe_files import read_yaml, state_of
from nanotrain.config.schema import KEYS, SECTIONS, flatten, nest
from nanotrain.config.suggest import by_meaning, did_you_mean, nearest_choice
from nanotrain.errors import ConfigError, ErrorCollector
from nanotrain.paths import local_path

_HYDRA = threading.RLock()  # Hydra is one per process: threads compose one after the other


def config_dir() -> Path:
    """The folder of built-in YAML.

    It is $NANOTRAIN_CONFIG_DIR, else the installed package's, else the repository's.
    """
    package = Path(__file__).resolve().parent.parent
    configured = os.environ.get("NANOTRAIN_CONFIG_DIR")
    candidates = [package / "_configs", package.parent / "configs"]
    if configured:
        candidates = [Path(configured).absolute()]
    for folder in candidates:
        if (folder / "train.yaml").is_file():
            return folder
    raise ConfigError(
        f"no train.yaml in {' or '.join(map(str, candidates))}",
        why="the recipes are composed from it",
        fix="unset NANOTRAIN_CONFIG_DIR" if configured else "install nanotrain again",
    )


def search_path(line: CommandLine) -> list[Path]:
    """The built-in folder, then the user's (`--config-dir`, `hydra.searchpath`)."""
    return [config_dir(), *(user_folder(text) for text in line.search_path)]


def user_folder(text: str) -> Path:
    """A folder of the user's files.

    Raises:
        ConfigError: there is no such folder.
    """
    if not text:
        raise ConfigError(
            "--config-dir is empty", why="it takes a folder", fix="name one or leave it out"
        )
    path = unquote(urlparse(text).path) if text.startswith("file:") else text
    folder = local_path(path).absolute()
    if not folder.is_dir():
        raise ConfigError(
            f"config folder {folder} cannot be read",
            why="it is a file" if folder.exists() else "there is no such folder",
            fix="name a folder with --config-dir",
        )
    return folder


def compose_files(line: CommandLine) -> tuple[dict[str, Any], dict[str, str]]:
    """The values that the chosen files set, by key, and the file of each.

    Raises:
        ConfigError: an unknown file, group, section or field, or YAML that cannot be read.
    """
    folders = search_path(line)
    choices = dict(line.choices)
    recipe_path = None
    if is_file(choices.get("config", "")):  # a file, such as a run's config.yaml
        recipe_path = local_path(choices.pop("config"))
    check_choices(choices, folders)
    chosen = choose_files(line.config_name, choices, folders=folders)
    values, files = merge_files(chosen, built_in=folders[0])
    if recipe_path is not None:
        settings = read_recipe_path(recipe_path, folders)
        values |= settings
        files |= dict.fromkeys(settings, str(recipe_path))
    return values, files


def choose_files(
    config_name: str, choices: Mapping[str, str], *, folders: Sequence[Path]
) -> list["ChosenFile"]:
    """The first file, and the files that its defaults list and the command line choose.

    Args:
        config_name: name of the first file.
        choices: name of the chosen file by group.
        folders: folders of the files.
    """
    base, listed = defaults_list(config_name, folders)
    if not choices and all(name is None for name in listed.values()):
        return [ChosenFile(base)]
    overrides = []
    for group, name in choices.items():
        prefix = "" if group in listed else "+"  # Hydra requires it before further groups
        overrides.append(f"{prefix}{group}={name}")
    locations = ",".join(f"'file://{folder}'" for folder in folders[1:])
    overrides.append(f"hydra.searchpath=[{locations}]")
    state: object = object()  # a user's folders may be large: resolved at every call
    if len(folders) == 1:
        paths = filter(Path.is_file, folders[0].rglob("*.yaml"))
        state = frozenset(map(state_of, paths))
    return resolve_files(config_name, tuple(overrides), folders=tuple(folders), state=state)


def read_recipe_path(path: Path, folders: Sequence[Path]) -> dict[str, Any]:
    """The values of `+config=FILE.yaml`, by key.

    Raises:
        ConfigError: there is no such file, or it sets nothing.
    """
    if not path.is_file():
        near = nearest_choice(path.stem, names_in("config", folders))
        raise ConfigError(
            f"there is no file {path}",
            why=f"+config={path} names one",
            fix=f"did you mean +config={near}, the recipe?" if near else "check the path",
        )
    values = read_yaml(path)
    if not values:
        raise ConfigError(
            f"{path} sets nothing",
            why="it is empty, or has comments alone",
            fix="write section: {field: value} into it, or leave +config out",
        )
    return settings_of_file(values, str(path))


@contextmanager
def composition_errors() -> Iterator[None]:
    """Errors of Hydra and OmegaConf become ConfigErrors with their innermost cause."""
    from hydra.errors import HydraException

    try:
        yield
    except (
        HydraException,
        OmegaConfBaseException,
        RecursionError,
        UnicodeDecodeError,
        yaml.YAMLError,
    ) as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        lines = [text.strip() for text in str(cause).splitlines() if text.strip()]
        raise ConfigError(
            "the YAML files cannot be composed",
            why=", ".join(lines[:3]),
            fix="correct that file or its defaults list, which must not include the file itself",
        ) from error


def defaults_list(config_name: str, folders: Sequence[Path]) -> tuple[Path, dict[str, str | None]]:
    """The first file, and the groups of its defaults list with the file chosen there.

    Raises:
        ConfigError: there is no such file.
    """
    for folder in folders:
        path = folder / f"{config_name}.yaml"
        if not path.is_file():
            continue
        listed: dict[str, str | None] = {}
        for entry in read_yaml(path).get("defaults") or []:
            if isinstance(entry, dict):
                listed |= entry
            elif entry != "_self_":
                listed[str(entry)] = str(entry)  # a file without a group
        return path, listed
    raise ConfigError(
        f"no {config_name}.yaml in {', '.join(map(str, folders))}", fix="leave --config-name out"
    )


def check_choices(choices: Mapping[str, str], folders: Sequence[Path]) -> None:
    """Check that every chosen group is a folder and every chosen name a file in it.

    Raises:
        ConfigError: one is not.
    """
    groups = set[str]()
    for folder in folders:
        groups |= {child.name for child in folder.iterdir() if child.is_dir()}
    for group, name in choices.items():
        if group not in groups:
            raise unknown_group(group, name, groups=groups)
        if name not in names_in(group, folders):
            raise unknown_name(group, name, folders=folders)
        for folder in folders:
            path = folder / group / f"{name}.yaml"
            if path.is_file():
                read_yaml(path)  # its mistakes are found before Hydra reads it


def unknown_group(group: str, name: str, *, groups: set[str]) -> ConfigError:
    """The error for `group=name` with a group that is no folder."""
    cures = [f"{group}.FIELD={name}"] if group in SECTIONS else []
    meant = by_meaning(group)
    if meant:
        cures.append(f"{meant} {name}" if meant in FLAGS else meant)
    fix = did_you_mean(group, [*KEYS, *groups, *SECTIONS])
    if cures:
        fix = f"write {' or '.join(cures)}"
    return ConfigError(
        f"unknown key {group}",
        why=f"it is neither section.field nor a group of YAML files ({', '.join(sorted(groups))})",
        fix=fix,
    )


def unknown_name(group: str, name: str, *, folders: Sequence[Path]) -> ConfigError:
    """The error for `group=name` with a name that no file of the group has."""
    names = names_in(group, folders)
    near = nearest_choice(name, names)
    choice = choice_of(group)
    candidates = (folder / f"{name}.yaml" for folder in (*folders, Path()))
    file = next((path for path in candidates if path.is_file()), None)
    why = f"there are {', '.join(names)}"
    if name.startswith("["):
        why = "of a group one file is chosen"
        fix = "name both in the defaults list of a recipe of your own (--config-dir DIR)"
    elif "," in name:
        fix = f"nanotrain sweep --over {choice}={name} trains each of them"
    elif file is not None and group == "config":
        fix = f"write +config={file} for the file of that name"
    elif group == "config" and Path(name).exists():
        why = "a recipe in a file has a name that ends in .yaml or .yml"
        fix = recipe_of(Path(name), names)
    elif near:  # before the names, of which there are many
        fix = f"did you mean {choice}={near}? {why[0].upper()}{why[1:]}"
        why = ""
    else:
        fix = f"write {choice}=NAME with one of these names"
    kind = "recipe" if group == "config" else group
    return ConfigError(f"there is no {kind} {name!r}", why=why, fix=fix)


def recipe_of(path: Path, names: Sequence[str]) -> str:
    """The cure if a folder or another file is named in place of a recipe."""
    if (path / "config.yaml").is_file():
        return f"write +config={path / 'config.yaml'} for the settings of that run"
    if path.is_dir():
        return f"write --config-dir {path} +config=NAME for a recipe in {path / 'config'}"
    return f"name a YAML file, or a recipe, of which there are {', '.join(names)}"


def names_in(group: str, folders: Sequence[Path]) -> list[str]:
    """The names of a group's YAML files."""
    names = set[str]()
    for folder in folders:
        parent = folder / group
        names |= {str(path.relative_to(parent))[:-5] for path in parent.rglob("*.yaml")}
    return sorted(names)


@dataclass(frozen=True)
class ChosenFile:
    """A file to merge."""

    path: Path
    section: str = ""  # the section that it fills; empty for a file that names its sections


@lru_cache
def resolve_files(
    config_name: str, overrides: tuple[str, ...], *, folders: tuple[Path, ...], state: object
) -> list[ChosenFile]:
    """The files that Hydra's defaults lists choose, in order of merging.

    Args:
        config_name: name of the first file.
        overrides: choices and the search path, in Hydra's form.
        folders: folders of the files.
        state: sizes and times of all files; with others they are resolved again.

    Raises:
        ConfigError: a defaults list that cannot be resolved, or a file that another of its name
            would shadow.
    """
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import MissingConfigException
    from hydra.types import RunMode

    with _HYDRA, composition_errors(), initialize_config_dir(str(folders[0]), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        try:
            composed = loader.compute_defaults_list(config_name, [*overrides], run_mode=RunMode.RUN)
        except MissingConfigException as error:
            raise missing_file(error.missing_cfg_file or "", folders) from None
    files: list[ChosenFile] = []
    for default in composed.defaults:
        path = find_file(f"{default.config_path}.yaml", folders)
        if path is not None:
            files.append(ChosenFile(path, section=default.package or ""))
    return files


def missing_file(file: str, folders: Sequence[Path]) -> ConfigError:
    """The error for a file that a defaults list names and no folder has."""
    group, _, name = file.rpartition("/")
    names = names_in(group, folders)
    near = nearest_choice(name, names)
    return ConfigError(
        f"there is no {group}/{name}.yaml",
        why=f"a defaults list names it; {group} has {', '.join(names) or 'no files'}",
        fix=f"did you mean {near}?" if near else "correct that entry",
    )


def find_file(name: str, folders: Sequence[Path]) -> Path | None:
    """The file of a name; None for one that Hydra brings itself.

    Raises:
        ConfigError: several folders have it.
    """
    paths = [folder / name for folder in folders if (folder / name).is_file()]
    if len(paths) > 1:
        where = " and in ".join(str(path.parent) for path in paths)
        raise ConfigError(
            f"{name} is in {where}", why="only the first would be read", fix="rename yours"
        )
    return paths[0] if paths else None


def merge_files(
    files: Sequence[ChosenFile], *, built_in: Path
) -> tuple[dict[str, Any], dict[str, str]]:
    """The values of files, later ones over earlier ones, and for each value the last file.

    Raises:
        ConfigError: an unknown section or field, or values that cannot be merged.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for file in files:
        content = dict(read_yaml(file.path))
        content.pop("defaults", None)
        if file.section:
            content = nest({file.section: content})
        name = str(file.path)
        if file.path.is_relative_to(built_in):
            name = str(file.path.relative_to(built_in))
        settings = settings_of_file(content, name)
        values |= settings
        sources |= dict.fromkeys(settings, name)
    return values, sources


def settings_of_file(content: Mapping[str, Any], file: str) -> dict[str, Any]:
    """The values that a file sets by key, all of which must exist.

    Raises:
        ConfigError: an unknown section or field, or a defaults list.
    """
    if list(content) == ["config"]:
        raise ConfigError(
            f"{file} would fill a section config",
            why="a recipe names its sections itself",
            fix="begin it with the line: # @package _global_",
        )
    if "defaults" in content:
        raise ConfigError(
            f"{file} has a defaults list",
            why="a recipe named by its path is read as it stands",
            fix=f"put it into a folder config/ and write --config-dir FOLDER "
            f"+config={Path(file).stem}",
        )
    errors = ErrorCollector()
    settings = dict(flatten(content, errors=errors))
    errors.raise_errors(where=f" in {file}")
    return settings
