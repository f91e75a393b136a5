"""What the files of a folder say about its model, for the rules that derive a row.

Missing       something that nanotrain lacks, and what asks for it
Findings      entries, tensors and code of a folder, and the row as far as it is derived
"""

import json
from dataclasses import dataclass, field
from typing import Any

from nanotrain.interop.hf.config_class import Entries
from nanotrain.interop.hf.derive.configuration import ConfigurationText
from nanotrain.interop.hf.derive.source import ModelingSource
from nanotrain.interop.hf.derive.tensors import TensorTable
from nanotrain.untrusted import plain_text, shown

Row = dict[str, Any]
# entries of Llama, and names of other families for them
STANDARD = {
    "hidden_size": ("n_embd", "d_model", "dim", "model_dim"),
    "intermediate_size": ("ffn_hidden_size", "n_inner", "ffn_dim", "d_ff"),
    "num_hidden_layers": ("num_layers", "n_layer", "n_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_kv_heads", "n_head_kv"),
    "max_position_embeddings": ("n_positions", "n_ctx", "max_seq_len", "seq_length"),
    "num_experts": ("n_routed_experts", "num_local_experts", "moe_num_experts"),
    "num_experts_per_tok": ("moe_topk", "moe_k", "num_experts_per_token", "top_k"),
    "n_shared_experts": ("num_shared_experts", "moe_num_shared_experts"),
    "routed_scaling_factor": ("router_scaling_factor", "route_scale", "moe_router_scale"),
    "hidden_act": ("hidden_activation", "activation_function", "activation"),
}
NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


@dataclass(frozen=True)
class Missing:
    """Something that nanotrain lacks, and the entry, tensor or line of code that asks for it."""

    what: str
    asked_by: str

    def __str__(self) -> str:
        return f"{self.what}: {self.asked_by}"


@dataclass
class Findings:
    """The files of a folder, and the row that rules derive from them.

    Attributes:
        kind: its `model_type`.
        architecture: the name of its class.
        entries: entries of config.json, with the defaults of its class.
        table: its tensors; None where no names are known.
        source: its modeling code; None without any.
        row: the row so far.
        choices: alternatives, of which the text does not say which one holds.
        missing: what nanotrain lacks.
        notes: what was concluded and may be wrong.
        defaults: entries of a model whose config.json has none.
        unproven: entries whose value is supported if a comparison with transformers says so.
        configuration: the text of the configuration class; None if transformers has the class.
        norms: norms of a block by their names in the code -> their modules.
    """

    kind: str
    architecture: str
    entries: Entries
    table: TensorTable
    source: ModelingSource | None
    row: Row = field(default_factory=dict)
    choices: list[list[Row]] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    defaults: Row = field(default_factory=dict)
    unproven: list[str] = field(default_factory=list)
    configuration: ConfigurationText | None = None
    norms: dict[str, str] = field(default_factory=dict)

    @property
    def code(self) -> str:
        """The modeling code; "" without any."""
        return "" if self.source is None else self.source.text

    @property
    def attention_code(self) -> str:
        """The code of attention."""
        return "" if self.source is None else self.source.text_of("Attention")

    def has(self, entry: str) -> bool:
        """Whether config.json has an entry that the code reads, if there is code."""
        is_read = self.source is None or entry in self.source.reads
        return is_read and entry in self.entries

    def size(self, entry: str) -> Any:
        """The value of an entry of Llama, under whatever name."""
        return self.entries.get(self.name_of(entry))

    def name_of(self, entry: str) -> str:
        """The name in config.json of an entry of Llama; of several, one that the code reads."""
        names = (entry, *STANDARD.get(entry, ()))
        there = [name for name in names if name in self.entries]
        read = [name for name in there if self.has(name)]
        return (read or there or [entry])[0]

    def table_of(self, name: str) -> Row:
        """A table of the row: "entries", "fixed", ..."""
        table: Row = self.row.setdefault(name, {})
        return table

    def add_part(self, name: str) -> None:
        """Add a part, once."""
        parts: list[str] = self.row.setdefault("parts", [])
        if name not in parts:
            parts.append(name)

    def require(self, entry: str, value: Any) -> None:
        """Support only one value of an entry."""
        self.table_of("required")[entry] = [value]

    def fix(self, key: str, value: Any) -> None:
        """Set a value of the model section for all models of the family."""
        self.table_of("fixed")[key] = value

    def lack(self, what: str, *, asked_by: str) -> None:
        """Remember that nanotrain lacks something."""
        self.missing.append(Missing(what, plain_text(asked_by)[:200]))

    def place_of(self, entry: str) -> str:
        """An entry with its value, and the code that reads it."""
        value = json.dumps(self.entries.get(entry), default=str)
        text = f"config.json has {entry}: {shown(value)[1:-1]}"
        place = self.source.reads.get(entry) if self.source is not None else None
        return f"{text}, read by {place}" if place else text
