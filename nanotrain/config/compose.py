"""Composition of YAML files by Hydra; no other file imports Hydra.

The order of precedence, lowest first: `train.yaml`, the chosen files of its groups, the recipe, the
command line. Hydra resolves the defaults lists into the files to merge, in order. They are merged
here, once, and so are the settings of the command line, which keeps their source. Hydra takes 0.4
s, so it is imported where a file is chosen, and files are resolved and read once, until they are
written again.
"""

import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote, urlparse

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException

from nanotrain.config.arguments import FLAGS, choice_of, is_file
from nanotrain.config.config import Config
from nanotrain.config.flags import CommandLine, Setting
from nanotrain.config.references import mark_references
from nanotrain.config.schema import ENTRIES, KEYS, SECTIONS, flat_values, flatten, nest
from nanotrain.config.suggest import by_meaning, did_you_mean, nearest_choice
from nanotrain.errors import ConfigError, ErrorCollector
from nanotrain.paths import is_secret, local_path

_HYDRA = threading.RLock()  # Hydra is one per process: threads compose one after the other
DEFAULTS = flat_values(Config())


def config_dir() -> Path:
    """The folder of built-in YAML: $NANOTRAIN_CONFIG_DIR, else the installed package's, else the
    repository's.
    """
    package = Path(__file__).resolve().parent.parent
    configured = os.environ.get("NANOTRAIN_CONFIG_DIR")
    candidates = (
        [Path(configured).absolute()]
        if configured
        else [package / "_configs", package.parent / "configs"]
    )
    for folder in candidates:
        if (folder / "train.yaml").is_file():
            return folder
    what = f"no train.yaml in {' or '.join(map(str, candidates))}"
    fix = "unset NANOTRAIN_CONFIG_DIR" if configured else "install nanotrain again"
    raise ConfigError(what, why="the recipes are composed from it", fix=fix)


def search_path(line: CommandLine) -> list[Path]:
    """The built-in folder, then the user's (`--config-dir`, `hydra.searchpath`)."""
    folders = [config_dir()]
    for text in line.search_path:
        if not text:
            raise ConfigError(
                "--config-dir is empty", why="it takes a folder", fix="name one or leave it out"
            )
        folder = local_path(
            unquote(urlparse(text).path) if text.startswith("file:") else text
        ).absolute()
        if not folder.is_dir():
            why = "it is a file" if folder.exists() else "there is no such folder"
            raise ConfigError(
                f"config folder {folder} cannot be read",
                why=why,
                fix="name a folder with --config-dir",
            )
        folders.append(folder)
    return folders


def compose_files(line: CommandLine) -> tuple[dict[str, Any], dict[str, str]]:
    """The values that the chosen files set, by key, and the file of each.

    Raises:
        ConfigError: an unknown file, group, section or field, or YAML that cannot be read.
    """
    folders = search_path(line)
    choices, recipe_path = dict(line.choices), None
    if is_file(choices.get("config", "")):  # a file, such as a run's config.yaml
        recipe_path = local_path(choices.pop("config"))
    check_choices(choices, folders)
    base, listed = defaults_list(line.config_name, folders)
    overrides = [
        f"{'' if group in listed else '+'}{group}={name}" for group, name in choices.items()
    ]
    overrides.append(
        "hydra.searchpath=[" + ",".join(f"'file://{folder}'" for folder in folders[1:]) + "]"
    )
    chosen = [(base, "")]
    if choices or any(name is not None for name in listed.values()):
        paths = filter(Path.is_file, folders[0].rglob("*.yaml"))
        # a user's folders may be large
        state = frozenset(map(state_of, paths)) if len(folders) == 1 else object()
        chosen = chosen_files(
            line.config_name, tuple(overrides), folders=tuple(folders), state=state
        )
    values, files = merge_files(chosen, built_in=folders[0])
    if recipe_path is not None:
        if not recipe_path.is_file():
            near = nearest_choice(recipe_path.stem, names_in("config", folders))
            fix = f"did you mean +config={near}, the recipe?" if near else "check the path"
            raise ConfigError(
                f"there is no file {recipe_path}", why=f"+config={recipe_path} names one", fix=fix
            )
        values_of_file = read_yaml(recipe_path)
        if not values_of_file:
            fix = "write section: {field: value} into it, or leave +config out"
            raise ConfigError(
                f"{recipe_path} sets nothing", why="it is empty, or has comments alone", fix=fix
            )
        settings = fields_of(values_of_file, str(recipe_path))
        files |= dict.fromkeys(settings, str(recipe_path))
        values |= settings
    return values, files


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
        fix = "correct that file or its defaults list, which must not include the file itself"
        raise ConfigError(
            "the YAML files cannot be composed", why=", ".join(lines[:3]), fix=fix
        ) from error


def defaults_list(config_name: str, folders: list[Path]) -> tuple[Path, dict[str, str | None]]:
    """The first file, and the groups of its defaults list with the file chosen there; Hydra
    requires `+` before others.

    Raises:
        ConfigError: there is no such file.
    """
    for folder in folders:
        if (path := folder / f"{config_name}.yaml").is_file():
            entries = [each for each in read_yaml(path).get("defaults") or [] if each != "_self_"]
            # a file without a group
            named = {str(each): str(each) for each in entries if not isinstance(each, dict)}
            return path, {
                **named,
                **{k: v for each in entries if isinstance(each, dict) for k, v in each.items()},
            }
    raise ConfigError(
        f"no {config_name}.yaml in {', '.join(map(str, folders))}", fix="leave --config-name out"
    )


def check_choices(choices: Mapping[str, str], folders: list[Path]) -> None:
    """Check that every chosen group is a folder and every chosen name a file in it."""
    groups = {child.name for folder in folders for child in folder.iterdir() if child.is_dir()}
    for group, name in choices.items():
        if group not in groups:
            why = f"it is neither section.field nor a group of YAML files ({', '.join(sorted(groups))})"
            meant = by_meaning(group)
            cures = [f"{group}.FIELD={name}"] if group in SECTIONS else []
            cures += [f"{meant} {name}" if meant in FLAGS else meant] if meant else []
            fix = (
                f"write {' or '.join(cures)}"
                if cures
                else did_you_mean(group, [*KEYS, *groups, *SECTIONS])
            )
            raise ConfigError(f"unknown key {group}", why=why, fix=fix)
        names = names_in(group, folders)
        if name not in names:
            near = nearest_choice(name, names)
            choice = choice_of(group)
            fix = (
                f"did you mean {choice}={near}?"
                if near
                else f"write {choice}=NAME with one of these names"
            )
            candidates = (folder / f"{name}.yaml" for folder in (*folders, Path()))
            file = next((each for each in candidates if each.is_file()), None)
            if file is not None and group == "config":
                fix = f"write +config={file} for the file of that name"
            if "," in name:
                fix = f"nanotrain sweep --over {choice}={name} trains each of them"
            raise ConfigError(
                f"there is no {'recipe' if group == 'config' else group} {name!r}",
                why=f"there are {', '.join(names)}",
                fix=fix,
            )
        for folder in folders:
            if (path := folder / group / f"{name}.yaml").is_file():
                read_yaml(path)  # its mistakes are found before Hydra reads it


def names_in(group: str, folders: Sequence[Path]) -> list[str]:
    """The names of a group's YAML files."""
    parents = [folder / group for folder in folders]
    return sorted(
        {
            str(path.relative_to(parent))[:-5]
            for parent in parents
            for path in parent.rglob("*.yaml")
        }
    )


@lru_cache
def chosen_files(
    config_name: str, overrides: tuple[str, ...], *, folders: tuple[Path, ...], state: object
) -> list[tuple[Path, str]]:
    """The files that Hydra's defaults lists choose, in order of merging, each with the section it
    fills ("": several).

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
            group, _, name = (error.missing_cfg_file or "").rpartition("/")
            names = names_in(group, folders)
            near = nearest_choice(name, names)
            raise ConfigError(
                f"there is no {group}/{name}.yaml",
                why=f"a defaults list names it; {group} has {', '.join(names) or 'no files'}",
                fix=f"did you mean {near}?" if near else "correct that entry",
            ) from None
    files: list[tuple[Path, str]] = []
    for default in composed.defaults:
        name = f"{default.config_path}.yaml"
        paths = [folder / name for folder in folders if (folder / name).is_file()]
        if len(paths) > 1:
            where = " and in ".join(str(path.parent) for path in paths)
            raise ConfigError(
                f"{name} is in {where}", why="only the first would be read", fix="rename yours"
            )
        files += [(path, default.package or "") for path in paths]
    return files


def merge_files(
    files: list[tuple[Path, str]], *, built_in: Path
) -> tuple[dict[str, Any], dict[str, str]]:
    """The values of files, later ones over earlier ones, and for each value the last file.

    Raises:
        ConfigError: an unknown section or field, or values that cannot be merged.
    """
    values, sources = dict[str, Any](), dict[str, str]()
    for path, package in files:
        content = {name: value for name, value in read_yaml(path).items() if name != "defaults"}
        shown = str(path.relative_to(built_in)) if path.is_relative_to(built_in) else str(path)
        settings = fields_of(nest({package: content}) if package else content, shown)
        values |= settings
        sources |= dict.fromkeys(settings, shown)
    return values, sources


def fields_of(values_of_file: dict[str, Any], file: str) -> dict[str, Any]:
    """The values that a file sets by key, all of which must exist."""
    if list(values_of_file) == ["config"]:
        why, fix = (
            "a recipe names its sections itself",
            "begin it with the line: # @package _global_",
        )
        raise ConfigError(f"{file} would fill a section config", why=why, fix=fix)
    if "defaults" in values_of_file:
        fix = (
            f"put it into a folder config/ and write --config-dir FOLDER +config={Path(file).stem}"
        )
        raise ConfigError(
            f"{file} has a defaults list",
            why="a recipe named by its path is read as it stands",
            fix=fix,
        )
    errors = ErrorCollector()
    settings = dict(flatten(values_of_file, errors=errors))
    errors.raise_errors(where=f" in {file}")
    return settings


def merge_settings(
    values: Mapping[str, Any], settings: list[Setting], *, defaults: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Merge settings of the command line into the values of the files, in order, and resolve
    interpolations.

    `values` and `defaults` are by key; `defaults` are used in place of the fields' own.
    """
    merged = nest(
        {
            **DEFAULTS,
            **(defaults or {}),
            **values,
            **{each.key: parse_value(each) for each in settings},
        }
    )
    if "${" not in str(merged):
        return merged  # OmegaConf takes 15 ms
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(merged), resolve=True)
        return cast(dict[str, Any], mark_references(resolved, merged))
    except OmegaConfBaseException as error:
        raise _interpolation_error(error, settings) from None


def _interpolation_error(error: OmegaConfBaseException, settings: Sequence[Setting]) -> ConfigError:
    """The error of a `${...}` that cannot be replaced by a value."""
    reason = str(error).splitlines()[0]
    if "Recursive" in reason:
        what = f"the value of {error.full_key or 'a field'} refers to itself"
        return ConfigError(
            what, why="${...} of several fields lead back to it", fix="give one of them a value"
        )
    missing = re.findall("'([^']+)'", reason)
    texts = [
        setting.text for setting in settings if any(f"{name}}}" in setting.text for name in missing)
    ]
    what = (
        f"{', '.join(texts) or error.full_key or 'a value'} refers to a value that cannot be found"
    )
    if "Environment variable" in reason:
        why, fix = (
            f"{missing[0]} is not in the environment",
            f"export it, or write ${{oc.env:{missing[0]},DEFAULT}}",
        )
        return ConfigError(what, why=why, fix=fix)
    fix = "replace the variable before the program starts, or write ${oc.env:NAME} for one of the environment"
    return ConfigError(what, why=reason, fix=fix)


def parse_value(setting: Setting) -> Any:
    """The value of a setting: a flag's text as it is, an override's by Hydra's grammar for lists
    and quotes.
    """
    if KEYS[setting.key].is_path:  # ${NAME} is a variable there, as a shell writes it
        written = setting.value if isinstance(setting.value, list) else [setting.value]
        texts = [re.sub(r"\$\{(\w+)\}", r"$\1", text) for text in written]
        setting = replace(setting, value=texts if isinstance(setting.value, list) else texts[0])
    if not setting.is_hydra or not isinstance(setting.value, str):
        return setting.value
    if not setting.value:
        raise ConfigError(
            f"{setting.text} has no value", why="it takes one", fix=f"write {setting.key}=VALUE"
        )
    if setting.value[0] not in "['\"":
        return setting.value
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(setting.text).value()
    except HydraException as error:
        why, fix = (
            str(error).splitlines()[0],
            f"close quotes and brackets, or write {KEYS[setting.key].flag} VALUE",
        )
        raise ConfigError(f"{setting.text} cannot be read", why=why, fix=fix) from None


def state_of(path: Path) -> tuple[Path, int, int]:
    """A file, its size and the time when it was written."""
    return path, (stat := path.stat()).st_size, stat.st_mtime_ns


@lru_cache
def plain_yaml(path: Path, *, state: object) -> Any:
    """The values in a YAML file of this state."""
    return OmegaConf.to_container(OmegaConf.load(path))


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        ConfigError: the file cannot be read, or holds none.
    """
    try:
        content = plain_yaml(path, state=state_of(path))
    except yaml.MarkedYAMLError as error:
        why = ", ".join(filter(None, (error.context, error.problem)))
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        fix = "correct the YAML; it is indented with spaces, and each key is set once"
        raise ConfigError(f"{path} cannot be read", why=line + why, fix=fix) from None
    except GrammarParseError as error:
        why, fix = (
            "a reference is ${section.field} or ${oc.env:NAME}",
            "close its bracket, or write the value",
        )
        raise ConfigError(
            f"{error.full_key} in {path} has a ${{...}} that cannot be read", why=why, fix=fix
        ) from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError, OmegaConfBaseException) as error:
        fix = "name a YAML file of nanotrain's sections, in UTF-8"
        raise ConfigError(
            f"{path} cannot be read", why=" ".join(str(error).split()), fix=fix
        ) from None
    if not isinstance(content, dict):
        why, fix = "a configuration has sections", "write section: {field: value}"
        raise ConfigError(f"{path} holds no mapping", why=why, fix=fix)
    check_references(content, file=path)
    return {str(key): value for key, value in content.items()}


def check_references(value: Any, *, file: Path, name: str = "") -> None:
    """Check the `${...}` of a file, which may come from others: they are fields, or variables that
    are no secrets.

    Args:
        value: a value of the file, before its references are replaced.
        file: the file.
        name: key of the value.

    Raises:
        ConfigError: another reference, or a value of a field that only a variable meant for it may
            give.
    """
    if isinstance(value, dict | list):
        for key, inner in (
            value.items() if isinstance(value, dict) else [(name, each) for each in value]
        ):
            check_references(inner, file=file, name=str(key))
        return
    meant = ENTRIES[name].secret if name in ENTRIES else ""
    if (
        meant
        and value is not None
        and not re.fullmatch(rf"\$\{{oc\.env:{meant}(, ?null)?\}}", str(value))
    ):
        fix = (
            f"write ${{oc.env:{meant},null}} there and export {meant}, or pass {ENTRIES[name].flag}"
        )
        raise ConfigError(
            f"{name} in {file} is not read",
            why="only its own variable may set it in a file",
            fix=fix,
        )
    for reference in () if meant else re.findall(r"(?=\$\{([^}]*))", str(value)):
        variable = re.fullmatch(r"oc\.env: *(\w+) *(,.*)?", reference)
        if (
            variable
            and is_secret(variable[1])
            or not variable
            and not re.fullmatch(r"\.*[\w.\[\]]+", reference)
        ):
            why = "a file may refer to fields, and to variables of the environment whose name is not that of a secret"
            fix = "write the value, or set the field on the command line"
            raise ConfigError(f"{name} in {file} refers to ${{{reference}}}", why=why, fix=fix)
