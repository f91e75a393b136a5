"""A covering array: a table of runs in which every pair of settings that may be combined appears in
some row.

    FACTORS        the settings of each factor, and what each of them is in the configuration
    ONLY_WITH      the combinations that are left out, nearly all of which the configuration refuses
    make_rows()    the rows, by a greedy search that always finds the same ones
    Row            one run: its `case`, the same without what may change no bit (`quiet`, `plain`), and one rank's

A fault that needs two settings to appear is in the array by construction, however far apart their
code lies.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import combinations, product
from typing import Any

from tests.harness import SHORT_NAMES
from tests.laws import test_every_axis
from tests.laws.test_mla import DIRECT
from tests.laws.worlds import GLOBAL_BATCH, Case

STEPS, LR = 2, 3e-3
SP, EP = {"sequence_parallel": True}, {"ep": 2}
FULL, SELECTIVE = {"recompute_granularity": "full"}, {"recompute_granularity": "selective"}
VPP = {"pipeline_schedule": "interleaved", "num_virtual_stages_per_pipeline_rank": 2}
# the sizes are multiples of 16 per rank, as fp8 needs them; vocabulary and biases give buckets
# padding
SIZES = {"num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 96, "kv_channels": 16}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": test_every_axis.MODELS["gpt2"] | {"hidden_dropout": 0.1},
    "mla": DIRECT
    | {
        "kv_channels": None,
        "kv_lora_rank": 32,
        "qk_head_dim": 16,
        "qk_pos_emb_head_dim": 16,
        "v_head_dim": 16,
    },
    "experts": test_every_axis.BIASED
    | {
        "moe_layer_freq": "[0]*1+[1]*3",
        "moe_ffn_hidden_size": 32,
        "moe_shared_expert_intermediate_size": 32,
    },
}
# name -> data-parallel ranks without instances, sizes of the other axes, options
LAYOUTS: dict[str, tuple[int, dict[str, int], dict[str, Any]]] = {
    "dp2": (2, {}, {}),
    "dp3": (3, {}, {}),
    "tp": (2, {"tp": 2}, {}),
    "sp": (2, {"tp": 2}, SP),
    "pp": (2, {"pp": 2}, {}),
    "interleaved": (2, {"pp": 2}, VPP),
    "zb-h1": (2, {"pp": 2}, {"pipeline_schedule": "zb-h1"}),
    "ring": (2, {"cp": 2}, {}),
    "a2a": (2, {"cp": 2}, {"cp_comm_type": "a2a"}),
    "allgather": (2, {"cp": 2}, {"cp_comm_type": "allgather"}),
    "ep": (4, EP, {}),
    "etp": (2, {"tp": 2, "etp": 2}, SP),
    "tp, ep": (2, {"tp": 2, "etp": 1} | EP, SP | {"moe_expert_rank_capacity_factor": 2.0}),
    "pp, ep": (2, {"pp": 2} | EP, {"pipeline_schedule": "zb-h1"}),
}
WITH_EXPERTS = ("ep", "etp", "tp, ep", "pp, ep")
FP8 = {
    "fp8 tensorwise": {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"},
    "fp8 delayed": {
        "fp8_format": "e4m3",
        "fp8_amax_history_len": 2,
        "fp8_amax_compute_algo": "max",
    },
    "fp8 rowwise": {"fp8_format": "hybrid", "fp8_recipe": "rowwise"},
    "fp8 blockwise": {"fp8_format": "e4m3", "fp8_recipe": "blockwise"},
}
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "uniform": FULL | {"recompute_method": "uniform", "recompute_num_layers": 2},
    "block": FULL | {"recompute_method": "block", "recompute_num_layers": 1},
    "core_attn": SELECTIVE,
    "layernorm, mlp": SELECTIVE | {"recompute_modules": ["layernorm", "mlp"]},
    "mla_up_proj": SELECTIVE | {"recompute_modules": ["mla_up_proj", "core_attn"]},
    "moe": SELECTIVE | {"recompute_modules": ["moe"]},
    "moe_act": SELECTIVE | {"recompute_modules": ["moe_act", "layernorm"]},
}
UNITS: dict[str, dict[str, Any]] = {
    "freed": {},
    "kept": {"reshard_after_forward": False},
    "in fixed memory": {"fsdp_double_buffer": True},
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adam": {"adam_eps": 1e-5},
    "sgd": {"sgd_momentum": 0.8, "lr": 3e-2},
    "muon": {"muon_fp32_matmul_prec": "highest", "muon_extra_scale_factor": 0.2, "adam_eps": 1e-5},
    "lion": {},
}
DTYPES = ("fp32", "bf16", "fp16")
FACTORS: dict[str, tuple[str, ...]] = {
    "layout": tuple(LAYOUTS),
    "recompute": tuple(RECOMPUTE),
    "params": (*DTYPES, *FP8),
    "strategy": ("no_shard", "optim", "optim_grads", "optim_grads_params"),
    "model": tuple(MODELS),
    "optimizer": tuple(OPTIMIZERS),
    "instances": ("1", "2"),
    "outer": ("no_shard", "optim"),
    "units": tuple(UNITS),
    "gather": ("as params", "fp8"),
    "reduction": ("fp32", "low", "low, summed in fp32"),
    "collective": ("sum", "mean", "all-reduce"),
    "main grads": ("fp32", "bf16"),
    "main params": DTYPES,
    "exp_avg": DTYPES,
    "exp_avg_sq": DTYPES,
    "offload": ("0", "0.5", "1"),
    "activations": ("on device", "on host"),
    "overlap": ("off", "on"),
    "accumulation": ("1", "many"),
    "fusion": ("off", "on"),
    "clipping": ("off", "on"),
    "qk-clip": ("off", "on"),
    "embeddings": ("tied", "untied"),
}
Pair = tuple[tuple[str, str], tuple[str, str]]

# the first factor's values that go with only some values of the second one
ONLY_WITH: tuple[tuple[str, tuple[str, ...], str, tuple[str, ...]], ...] = (
    ("instances", ("2",), "strategy", FACTORS["strategy"][1:]),
    ("outer", ("optim",), "instances", ("2",)),
    ("outer", ("optim",), "strategy", FACTORS["strategy"][1:]),
    ("units", ("kept", "in fixed memory"), "strategy", ("optim_grads_params",)),
    ("collective", ("all-reduce",), "strategy", ("no_shard", "optim")),
    ("collective", ("all-reduce",), "units", ("freed",)),
    ("reduction", ("low", "low, summed in fp32"), "params", FACTORS["params"][1:]),
    ("reduction", ("low, summed in fp32",), "strategy", FACTORS["strategy"][1:]),
    ("reduction", ("low, summed in fp32",), "collective", ("sum", "mean")),
    ("main grads", ("bf16",), "params", ("bf16", *FP8)),
    ("main grads", ("bf16",), "reduction", ("low", "low, summed in fp32")),
    ("main params", ("bf16", "fp16"), "params", FACTORS["params"][1:]),
    ("exp_avg_sq", ("bf16", "fp16"), "optimizer", ("adam", "muon")),
    ("gather", ("fp8",), "strategy", FACTORS["strategy"][1:]),
    ("gather", ("fp8",), "params", ("fp8 tensorwise", "fp8 delayed", "fp8 blockwise")),
    ("activations", ("on host",), "recompute", ("none",)),
    ("recompute", ("mla_up_proj",), "model", ("mla",)),
    (
        "recompute",
        ("mla_up_proj",),
        "layout",
        tuple(name for name in LAYOUTS if name not in WITH_EXPERTS),
    ),
    ("recompute", ("moe", "moe_act"), "model", ("experts",)),
    ("layout", WITH_EXPERTS, "model", ("experts",)),
)


@dataclass(frozen=True)
class Row:
    """One run: a value of every factor."""

    values: tuple[tuple[str, str], ...]

    @cached_property
    def choice(self) -> dict[str, str]:
        """The value of each factor."""
        return dict(self.values)

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.values)

    def but(self, **changes: str) -> "Row":
        """With other values; a factor's name has an underscore for a space or a hyphen."""
        named = {name.replace(" ", "_").replace("-", "_"): name for name in FACTORS}
        return Row(
            tuple((self.choice | {named[key]: value for key, value in changes.items()}).items())
        )

    @property
    def sizes(self) -> dict[str, Any]:
        """Sizes of the axes, instances and strategy by their short names."""
        sizes = LAYOUTS[self.choice["layout"]][1] | {"strategy": self.choice["strategy"]}
        return sizes | ({"instances": 2} if self.choice["instances"] == "2" else {})

    @property
    def num_data_parallel(self) -> int:
        """Data-parallel ranks, for two instances twice as many; of experts alone, whose shards are
        then one rank's.
        """
        ranks, sizes, _ = LAYOUTS[self.choice["layout"]]
        return 2 * ranks if self.choice["instances"] == "2" and sizes != EP else ranks

    @property
    def num_ranks(self) -> int:
        """Ranks of the world."""
        sizes = LAYOUTS[self.choice["layout"]][1]
        ranks = self.num_data_parallel
        for axis in ("tp", "pp", "cp"):
            ranks *= sizes.get(axis, 1)
        return ranks

    @property
    def num_microbatches(self) -> int:
        """Microbatches of a step."""
        many = 2 if self.choice["layout"] == "dp3" else 3
        return many if self.choice["accumulation"] == "many" else 1

    @property
    def quiet(self) -> "Row":
        """Without what changes time and memory only (L7)."""
        activations = {"recompute": "none", "activations": "on device"}
        offload = (
            self.choice["offload"] if self.choice["offload"] == "0.5" and self.has_blocks else "0"
        )
        return self.but(**activations, offload=offload, overlap="off", units="freed")

    @property
    def plain(self) -> "Row":
        """`quiet` with the strategy that shards least, with the same sums in the same order."""
        return self.quiet.but(outer="no_shard", gather="as params", strategy=self.least_sharded)

    @property
    def has_whole_grads(self) -> bool:
        """Whether the gradients of a step are added up before they are reduced."""
        return self.choice["strategy"] in ("no_shard", "optim")

    @property
    def least_sharded(self) -> str:
        """The first strategy that the other settings allow."""
        needs_shards = (
            self.choice["instances"] == "2" or self.choice["reduction"] == "low, summed in fp32"
        )
        return "optim" if needs_shards else "no_shard"

    @property
    def sums_as_plain(self) -> bool:
        """Whether `plain` adds up the same numbers in the same order.

        Sharded gradients are reduced every microbatch, and products do not write all of them. The
        norm, by which gradients are clipped, is a sum over shards. A mean of three ranks is not
        taken by a power of two.
        """
        is_rounded = self.choice["fusion"] == "on" and self.choice["params"] != "fp32"
        grads = self.has_whole_grads or (self.num_microbatches == 1 and not is_rounded)
        mean = self.choice["collective"] != "mean" or self.choice["layout"] != "dp3"
        return grads and mean and not self.has_blocks and self.choice["clipping"] == "off"

    @property
    def has_blocks(self) -> bool:
        """Whether state is stored in blocks with one scale; they begin where a shard, or its part
        on the host, does.
        """
        return "fp16" in (self.choice[name] for name in ("main params", "exp_avg", "exp_avg_sq"))

    @property
    def single(self) -> Case:
        """The same model, precision and update rule on one rank, in one microbatch, with fp32
        gradients.
        """
        keys = (
            "model",
            "embeddings",
            "optimizer",
            "params",
            "main params",
            "exp_avg",
            "exp_avg_sq",
        )
        same = {key: self.choice[key] for key in (*keys, "clipping", "qk-clip")}
        row = Row(tuple((DEFAULTS | same).items()))
        return row._case(num_layers=self.num_layers, parallel={}, micro_batch_size=GLOBAL_BATCH)

    @property
    def num_layers(self) -> int:
        """Two for each stage."""
        return 8 if self.choice["layout"] == "interleaved" else 4

    @property
    def case(self) -> Case:
        """What is trained."""
        options = LAYOUTS[self.choice["layout"]][2]
        parallel = (
            {SHORT_NAMES[name]: size for name, size in self.sizes.items()}
            | options
            | self._parallel()
        )
        micro_batch_size = GLOBAL_BATCH // self.num_data_parallel // self.num_microbatches
        return self._case(
            num_layers=self.num_layers, parallel=parallel, micro_batch_size=micro_batch_size
        )

    def _parallel(self) -> dict[str, Any]:
        choice, options = self.choice, dict(UNITS[self.choice["units"]])
        is_sharded, overlap = choice["strategy"] != "no_shard", choice["overlap"] == "on"
        options |= {"outer_dp_sharding_strategy": choice["outer"], "overlap_grad_reduce": overlap}
        options |= {"gradient_accumulation_fusion": choice["fusion"] == "on"}
        options |= {"overlap_param_gather": overlap and is_sharded}
        options |= {"ddp_average_in_collective": choice["collective"] == "mean"}
        options |= {"force_all_reduce": choice["collective"] == "all-reduce" and is_sharded}
        options |= {
            "reduce_scatter_with_fp32_accumulation": choice["reduction"] == "low, summed in fp32"
        }
        if (
            choice["strategy"] == "optim_grads_params"
            and overlap
            and choice["units"] == "in fixed memory"
        ):
            options |= {"fsdp_prefetch_depth": 2}
        return options

    def _case(self, *, num_layers: int, parallel: dict[str, Any], micro_batch_size: int) -> Case:
        choice, dtype = (
            self.choice,
            self.choice["params"] if self.choice["params"] in DTYPES else "bf16",
        )
        precision = {"params_dtype": dtype, "main_grads_dtype": choice["main grads"]} | FP8.get(
            choice["params"], {}
        )
        precision |= {"fp8_param_gather": True} if choice["gather"] == "fp8" else {}
        if dtype != "fp32":
            precision |= {"accumulate_allreduce_grads_in_fp32": choice["reduction"] == "fp32"}
        precision |= {"initial_loss_scale": 2.0**10} if dtype == "fp16" else {}
        states = {
            f"{name}_dtype".replace(" ", "_"): choice[name]
            for name in ("main params", "exp_avg", "exp_avg_sq")
        }
        is_aware = any(value != "fp32" for value in states.values())
        precision |= states | {"use_precision_aware_optimizer": is_aware}
        optim = {"lr": LR, "clip_grad": 0.2 if choice["clipping"] == "on" else 0.0} | OPTIMIZERS[
            choice["optimizer"]
        ]
        optim |= {"optimizer": choice["optimizer"], "qk_clip": choice["qk-clip"] == "on"}
        optim |= {"qk_clip_threshold": 0.02} if choice["qk-clip"] == "on" else {}
        if choice["offload"] != "0":
            optim |= {
                "optimizer_cpu_offload": True,
                "optimizer_offload_fraction": float(choice["offload"]),
            }
        model = SIZES | MODELS[choice["model"]] | {"num_layers": num_layers}
        model |= {"untie_embeddings_and_output_weights": choice["embeddings"] == "untied"}
        if choice["embeddings"] == "untied":
            optim |= {"decoupled_lr": 2e-3}
        if choice["model"] == "experts":
            model |= {"moe_layer_freq": f"[0]*1+[1]*{num_layers - 1}"}
        memory = dict(RECOMPUTE[choice["recompute"]])
        if choice["activations"] == "on host":
            memory |= {"cpu_offloading": True, "cpu_offloading_num_layers": 1}
        return Case(STEPS).but(
            train={"micro_batch_size": micro_batch_size},
            model=model,
            optim=optim,
            precision=precision,
            memory=memory,
            parallel=parallel,
        )


DEFAULTS = {name: values[0] for name, values in FACTORS.items()} | {"model": "llama"}


@cache
def refused(first: tuple[str, str], second: tuple[str, str]) -> bool:
    """Whether the configuration refuses these two values together, whatever the others are."""
    for name, values, other, allowed in ONLY_WITH:
        for one, two in ((first, second), (second, first)):
            if one[0] == name and one[1] in values and two[0] == other and two[1] not in allowed:
                return True
    return False


@cache
def pairs_to_cover() -> frozenset[Pair]:
    """Every two values of two factors that may be combined, in the order of the factors."""
    pairs = set()
    for one, two in combinations(FACTORS, 2):
        values = product(
            ((one, value) for value in FACTORS[one]), ((two, value) for value in FACTORS[two])
        )
        pairs |= {(first, second) for first, second in values if not refused(first, second)}
    return frozenset(pairs)


@cache
def make_rows() -> tuple[Row, ...]:
    """The covering array: every row begins with a pair that none has yet and takes as many others
    as it can.
    """
    rows, missing, order = [], set(pairs_to_cover()), list(FACTORS)
    number = {(name, value): i for name in FACTORS for i, value in enumerate(FACTORS[name])}
    while missing:
        start = min(
            missing,
            key=lambda pair: [(order.index(name), number[name, value]) for name, value in pair],
        )
        chosen = dict(start)
        for name in sorted(FACTORS, key=lambda name: -len(FACTORS[name])):
            if name not in chosen:
                chosen[name] = _best_value(name, chosen, missing)
        row = Row(tuple((name, chosen[name]) for name in FACTORS))
        missing -= set(pairs_of(row))
        rows.append(row)
    return tuple(rows)


def _best_value(name: str, chosen: dict[str, str], missing: set[Pair]) -> str:
    """The value that adds most missing pairs to those chosen, of equal ones the first."""
    allowed = [
        v for v in FACTORS[name] if not any(refused((name, v), other) for other in chosen.items())
    ]
    assert allowed, f"no value of {name} goes with {chosen}"
    return max(
        allowed,
        key=lambda v: sum(_ordered((name, v), other) in missing for other in chosen.items()),
    )


def pairs_of(row: Row) -> Iterator[Pair]:
    """The pairs of a row."""
    yield from combinations(row.values, 2)


def _ordered(first: tuple[str, str], second: tuple[str, str]) -> Pair:
    order = list(FACTORS)
    return (first, second) if order.index(first[0]) < order.index(second[0]) else (second, first)
