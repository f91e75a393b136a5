"""A parsed command line: settings, flags of Megatron-LM, chosen files and mistakes."""

from dataclasses import dataclass, field

from nanotrain.config.megatron import MegatronFlag
from nanotrain.config.suggest import LISTED_BY
from nanotrain.errors import ErrorCollector


@dataclass(frozen=True)
class Setting:
    """One field set on the command line."""

    key: str
    value: str | list[str]  # text of the value; of a deletion the value that it requires, or ""
    text: str  # the arguments as written
    is_hydra: bool = False  # the text follows Hydra's grammar: [a,b] and quotes mean something
    is_deletion: bool = False  # the field returns to its default


@dataclass(frozen=True)
class MegatronArgument:
    """A flag of Megatron-LM that is no field: a row of `tables/megatron.yaml`."""

    flag: str
    row: MegatronFlag = field(compare=False)
    value: str = ""  # several values are separated by spaces

    @property
    def text(self) -> str:
        """The argument as written."""
        return f"{self.flag} {self.value}".strip()


@dataclass
class CommandLine:
    """A parsed command line."""

    settings: list[Setting] = field(default_factory=list)  # the fields that are set, in order
    aliases: list[str] = field(default_factory=list)  # alias flags, in order
    megatron: list[MegatronArgument] = field(default_factory=list)  # flags of Megatron-LM, in order
    overruled: list[str] = field(default_factory=list)  # flags that replaced others, for the log
    # group of YAML files -> name of the chosen file; `config` -> the recipe
    choices: dict[str, str] = field(default_factory=dict)
    search_path: list[str] = field(default_factory=list)  # folders of `--config-dir`
    config_name: str = "train"  # the file that composition starts from
    data_parallel_size: int | None = None  # value of `--data-parallel-size`
    help_topic: str | None = None  # value of `--help=TOPIC`; empty for `--help`
    wants_megatron_defaults: bool = False
    wants_job: bool = False
    wants_explanation: bool = False
    listed_by: str = LISTED_BY  # the command that lists the flags, for errors
    # all mistakes; `load_line` raises them together with mistakes in types
    errors: ErrorCollector = field(default_factory=ErrorCollector)

    @property
    def explicit(self) -> frozenset[str]:
        """The keys of the fields set on the command line."""
        return frozenset(setting.key for setting in self.settings)

    @property
    def megatron_rows(self) -> dict[str, MegatronFlag]:
        """The rows of Megatron-LM's flags, by flag, in order."""
        return {argument.flag: argument.row for argument in self.megatron}
