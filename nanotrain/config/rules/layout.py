"""Rules of the parallel layout for a model: what the ranks of an axis share evenly.

tp splits heads, MLP width and vocabulary rows; cp the sequence into two chunks per rank; ep the
experts and etp the width of each. `stages.py` has the layers of pipeline stages, `memory.py`
recomputation, offloading and fp8.
"""

from math import lcm, prod

from nanotrain.config.rules.settings import Errors, Settings
from nanotrain.config.schedules import length_schedule
from nanotrain.config.schema import typed
from nanotrain.errors import ConfigError
from nanotrain.quantities import count_of, round_up

TP_DIVIDES = "tensor_model_parallel_size must divide it"
OTHER_TP = "or another --tensor-model-parallel-size"
NO_EXPERTS = "the model has no experts: num_experts is unset"


def check_optimizer_instances(c: Settings) -> Errors:
    """Optimizer instances replicate shards; `nanotrain topology` shows them without a strategy."""
    instances = c.parallel.num_distributed_optimizer_instances
    if instances > 1 and c.parallel.data_parallel_sharding_strategy == "no_shard":
        yield ConfigError(
            f"--num-distributed-optimizer-instances {instances} has no effect with no_shard",
            why="no_shard replicates the optimizer state on every rank, so there are no shards to "
            "replicate",
            fix="set --data-parallel-sharding-strategy optim or "
            "--num-distributed-optimizer-instances 1",
        )


def check_query_heads(c: Settings) -> Errors:
    """Check query heads over tensor-parallel ranks."""
    for name, num_heads in query_heads(c).items():
        if num_heads % c.tp != 0:
            flag = "--" + name.replace("_", "-")
            yield ConfigError(
                f"{name} {num_heads} cannot be shared by tp={c.tp} ranks",
                why=TP_DIVIDES,
                fix=f"set {flag} {round_up(num_heads, c.tp)} {OTHER_TP}",
            )


def query_heads(c: Settings) -> dict[str, int]:
    """Numbers of query heads by their setting."""
    heads = {"num_attention_heads": c.model.num_attention_heads}
    if c.model.window_num_attention_heads is not None:
        heads["window_num_attention_heads"] = c.model.window_num_attention_heads
    return heads


def check_key_value_heads(c: Settings) -> Errors:
    """Check key/value heads over tensor-parallel ranks."""
    groups = c.model.window_query_groups
    if groups is not None and groups % c.tp != 0 and c.tp % groups != 0:
        yield ConfigError(
            f"{count_of(groups, 'key/value head')} of layers with a window (window_query_groups) "
            f"cannot be shared by tp={c.tp} ranks",
            why="they are split over the ranks, or each is held by as many ranks as share it",
            fix=f"set --window-query-groups to a divisor or a multiple of {c.tp}",
        )
    if c.model.multi_latent_attention:
        return
    groups = c.model.query_groups
    if groups % c.tp != 0 and c.tp % groups != 0:
        yield ConfigError(
            f"{count_of(groups, 'key/value head')} (num_query_groups) cannot be shared by "
            f"tp={c.tp} ranks",
            why="a rank has several whole heads, or several ranks replicate one",
            fix="set --num-query-groups or --tensor-model-parallel-size so that one divides the "
            f"other, as --num-query-groups {c.tp}",
        )
    elif groups % c.tp != 0 and c.model.sparse_attention_type == "blocks":
        yield ConfigError(
            f"sparse_attention_type blocks with {count_of(groups, 'key/value head')} "
            f"(num_query_groups) over tp={c.tp} ranks",
            why="a rank selects blocks for all query heads of a key/value head",
            fix=f"set --tensor-model-parallel-size to a divisor of {groups}",
        )


def check_mlp_width(c: Settings) -> Errors:
    """Check widths of dense MLPs and shared experts over tensor-parallel ranks."""
    width = c.model.ffn_size
    if c.has_dense_layers and width % c.tp != 0:
        yield ConfigError(
            f"ffn_hidden_size {width} cannot be shared by tp={c.tp} ranks",
            why=TP_DIVIDES,
            fix=f"set --ffn-hidden-size {round_up(width, c.tp)} {OTHER_TP}",
        )
    shared = c.moe.shared_expert_intermediate_size
    if any(c.model.moe_layers) and shared is not None and shared % c.tp != 0:
        yield ConfigError(
            f"moe_shared_expert_intermediate_size {shared} cannot be shared by tp={c.tp} ranks",
            why=TP_DIVIDES,
            fix=f"set --moe-shared-expert-intermediate-size {round_up(shared, c.tp)} {OTHER_TP}",
        )


def check_vocabulary(c: Settings) -> Errors:
    """Check rows of the vocabulary over tensor-parallel ranks, once its size is known."""
    if c.model.vocab_size is None:
        return
    num_rows = c.model.padded_vocab_size
    multiple = c.model.make_vocab_size_divisible_by
    if num_rows % c.tp != 0:
        yield ConfigError(
            f"a vocabulary padded to a multiple of {multiple} cannot be shared by tp={c.tp} ranks",
            why=f"they would share {count_of(num_rows, 'row')}",
            fix=f"set --make-vocab-size-divisible-by {lcm(multiple, c.tp)}",
        )


def check_sequence_length(c: Settings) -> Errors:
    """Check sequences over context-parallel and tensor-parallel ranks."""
    length = c.data.seq_length
    parts = sequence_parts(c)
    if length % parts != 0:
        yield ConfigError(
            f"seq_length {length} cannot be split into {parts} parts",
            why=why_sequence_parts(c),
            fix=f"set --seq-length {round_up(length, parts)}",
        )
    if uneven := uneven_lengths(c):
        yield ConfigError(
            f"the length {uneven[0]} of step_seq_length_schedule cannot be split into {parts} "
            "parts",
            why=why_sequence_parts(c),
            fix=f"use lengths that are multiples of {parts} in --step-seq-length-schedule",
        )


def splits_sequence_by_tp(c: Settings) -> bool:
    """Whether tensor-parallel ranks split the sequence in some layers."""
    if c.tp == 1:
        return False
    return c.parallel.sequence_parallel or c.has_experts


def sequence_parts(c: Settings) -> int:
    """The number that seq_length must be a multiple of."""
    chunks = 2 * c.cp if c.cp > 1 else 1
    return lcm(chunks, c.tp * c.cp) if splits_sequence_by_tp(c) else chunks


def why_sequence_parts(c: Settings) -> str:
    """The reasons for `sequence_parts`."""
    reasons = []
    split = "the sequence"
    if c.cp > 1:
        reasons.append(f"cp={c.cp} ranks have two chunks each")
        split = "the two together"
    if splits_sequence_by_tp(c):
        splitter = "sequence_parallel" if c.parallel.sequence_parallel else "a layer with experts"
        reasons.append(f"{splitter} splits {split} over tp={c.tp} ranks")
    return " and ".join(reasons)


def uneven_lengths(c: Settings) -> list[int]:
    """Lengths of the schedule below seq_length that cannot be split into `sequence_parts`."""
    return [length for length in shorter_lengths(c) if length % sequence_parts(c) != 0]


def shorter_lengths(c: Settings) -> list[int]:
    """Lengths of the schedule below seq_length."""
    if not c.train.step_seq_length_schedule:
        return []
    try:
        schedule = length_schedule(c.config)
    except ConfigError:  # the mistake in the schedule is an error of its own
        return []
    return [] if schedule is None else list(schedule.sizes[:-1])


def check_attention_over_cp(c: Settings) -> Errors:
    """Check attention over context-parallel ranks."""
    comm_type = c.parallel.cp_comm_type
    inside = c.parallel.all_to_all_ranks
    ranks = c.tp * inside
    group = f"cp={inside} ranks"
    product = "tp*cp"
    if comm_type == "a2a+p2p":
        group = f"{inside} ranks of an all-to-all"
        product = "tp times these"
    yield from check_cp_sizes(c)
    for name, num_heads in query_heads(c).items():
        if comm_type in ("a2a", "a2a+p2p") and num_heads % ranks != 0:
            flag = "--" + name.replace("_", "-")
            yield ConfigError(
                f"{count_of(num_heads, 'attention head')} cannot be shared by {group}",
                why=f"cp_comm_type {comm_type} needs {product} = {ranks} to divide {name}",
                fix=f"set --cp-comm-type p2p or {flag} {round_up(num_heads, ranks)}",
            )
    sparse = c.model.sparse_attention_type
    if sparse is not None and c.cp > 1 and comm_type != "allgather":
        yield ConfigError(
            f"sparse_attention_type {sparse} with cp_comm_type {comm_type} over cp={c.cp} ranks",
            why="an indexer compares a query with every earlier token before attention can begin",
            fix="set --cp-comm-type allgather",
        )


def check_cp_sizes(c: Settings) -> Errors:
    """Check the two levels of context parallelism."""
    sizes = c.parallel.hierarchical_context_parallel_sizes
    if c.parallel.cp_comm_type == "a2a+p2p" and sizes and (len(sizes) != 2 or prod(sizes) != c.cp):
        yield ConfigError(
            f"hierarchical_context_parallel_sizes {typed(sizes)} with cp={c.cp} ranks",
            why="it has the ranks of an all-to-all and of a ring, whose product is cp",
            fix="leave --hierarchical-context-parallel-sizes out, or set two such numbers",
        )


def check_delta_rule_heads(c: Settings) -> Errors:
    """Check heads of Gated DeltaNet and KDA over ranks."""
    if not c.has_delta_rule:
        return
    num_keys = c.linear.num_key_heads
    num_values = c.linear.num_value_heads
    ranks = c.tp * c.cp
    if num_keys % c.tp != 0:
        yield ConfigError(
            f"linear_num_key_heads {num_keys} cannot be shared by tp={c.tp} ranks",
            why=TP_DIVIDES,
            fix=f"set --linear-num-key-heads {round_up(num_keys, c.tp)} {OTHER_TP}",
        )
    if c.parallel.cp_comm_type == "a2a" and num_values % ranks != 0:
        yield ConfigError(
            f"{count_of(num_values, 'value head')} (linear_num_value_heads) cannot be shared by "
            f"cp={c.cp} ranks",
            why=f"cp_comm_type a2a needs tp*cp = {ranks} to divide linear_num_value_heads",
            fix=f"set --cp-comm-type p2p or --linear-num-value-heads {round_up(num_values, ranks)}",
        )


def check_mamba_heads(c: Settings) -> Errors:
    """Check groups and heads of Mamba-2 over ranks."""
    if not c.has_mamba:
        return
    num_groups = c.mamba.num_groups
    num_heads = c.model.mamba_heads
    ranks = c.tp * c.cp
    if num_groups % c.tp != 0:
        yield ConfigError(
            f"mamba_num_groups {num_groups} cannot be shared by tp={c.tp} ranks",
            why=TP_DIVIDES,
            fix=f"set --mamba-num-groups {round_up(num_groups, c.tp)} {OTHER_TP}",
        )
    if c.parallel.cp_comm_type == "a2a" and num_heads % ranks != 0:
        yield ConfigError(
            f"{count_of(num_heads, 'head')} of Mamba-2 cannot be shared by cp={c.cp} ranks",
            why=f"cp_comm_type a2a needs tp*cp = {ranks} to divide mamba_num_heads",
            fix=f"set --cp-comm-type p2p or --mamba-num-heads {round_up(num_heads, ranks)}",
        )


def check_short_convolutions(c: Settings) -> Errors:
    """Check channels of short convolutions over tp, and their tokens over cp."""
    hidden_size = c.model.hidden_size
    for name, kind in c.linear_kinds.items():
        if kind.shards_hidden_size and hidden_size % c.tp != 0:
            yield ConfigError(
                f"hidden_size {hidden_size} cannot be shared by tp={c.tp} ranks",
                why=f"linear_attention_type {name} splits its channels",
                fix=f"set --hidden-size {round_up(hidden_size, c.tp)} {OTHER_TP}",
            )
    if c.cp == 1:
        return
    length = c.data.seq_length
    halo_tokens = num_halo_tokens(c)
    reader = "attention with compressed keys" if c.model.compressed else "a short convolution"
    why = f"{reader} sees {count_of(halo_tokens, 'token')} before its own, in one chunk"
    least = 2 * c.cp * halo_tokens
    if length < least:
        yield ConfigError(
            f"seq_length {length} has {tokens_of_chunks(c, length)}",
            why=why,
            fix="raise --seq-length or set a smaller --context-parallel-size",
        )
        return
    short = [shorter for shorter in shorter_lengths(c) if shorter < least]
    if short:
        yield ConfigError(
            f"the length {short[0]} of step_seq_length_schedule has "
            f"{tokens_of_chunks(c, short[0])}",
            why=why,
            fix=f"use lengths of at least {shortest_sequence(c)} in --step-seq-length-schedule, "
            "or set a smaller --context-parallel-size",
        )


def tokens_of_chunks(c: Settings, length: int) -> str:
    """The tokens of a chunk of a sequence over cp, in words."""
    chunk_tokens = count_of(length // (2 * c.cp), "token")
    return f"{chunk_tokens} in each of the two chunks of cp={c.cp} ranks"


def shortest_sequence(c: Settings) -> int:
    """The fewest tokens of a sequence that the ranks can share, a multiple of `sequence_parts`."""
    parts = sequence_parts(c)
    if c.cp == 1:
        return parts
    return round_up(max(1, 2 * c.cp * num_halo_tokens(c)), parts)


def num_halo_tokens(c: Settings) -> int:
    """The number of tokens that a cp chunk receives from the chunk before it."""
    longest = 1
    for kind in c.linear_kinds.values():
        sizes = c.mamba if kind.has_mamba else c.linear
        longest = max(longest, sizes.conv_kernel_dim)
    return max(longest - 1, c.num_window_tokens)


def check_axes_without_experts(c: Settings) -> Errors:
    """Expert axes have no effect without experts."""
    if c.has_experts:
        return
    if c.ep > 1:
        yield ConfigError(
            f"expert_model_parallel_size {c.ep} has no effect",
            why=NO_EXPERTS,
            fix="set --num-experts or leave --expert-model-parallel-size out",
        )
    etp = c.parallel.expert_tensor_parallel_size
    if etp is not None and etp > 1:
        yield ConfigError(
            f"expert_tensor_parallel_size {etp} has no effect",
            why=NO_EXPERTS,
            fix="set --num-experts or leave --expert-tensor-parallel-size out",
        )


def check_experts(c: Settings) -> Errors:
    """Check experts over expert-parallel ranks."""
    num_experts = c.moe.num_experts
    if c.has_experts and num_experts % c.ep != 0:
        yield ConfigError(
            f"{count_of(num_experts, 'expert')} cannot be shared by ep={c.ep} ranks",
            why="expert_model_parallel_size must divide num_experts",
            fix=f"set --num-experts {round_up(num_experts, c.ep)} or another "
            "--expert-model-parallel-size",
        )


def check_hierarchical_dispatch(c: Settings) -> Errors:
    """Check dispatch that sends a token once to a group of ranks."""
    group = c.parallel.moe_hierarchical_dispatch
    if group is None:
        return
    if c.ep % group != 0:
        yield ConfigError(
            f"ep={c.ep} ranks do not form groups of moe_hierarchical_dispatch {group}",
            why="a token is sent once to every so many ranks of ep",
            fix="set --moe-hierarchical-dispatch 1, or the ranks of ep on a node",
        )
    if c.parallel.moe_expert_rank_capacity_factor is not None:
        yield ConfigError(
            "moe_expert_rank_capacity_factor with moe_hierarchical_dispatch",
            why="tokens that cross to a node once are sent in exact numbers",
            fix="leave --moe-hierarchical-dispatch or --moe-expert-rank-capacity-factor out",
        )


# the recipes with blocks within a token and scales that are powers of two: a cast of cast tokens
# changes no value
_DISPATCHED = {"fp8": ("rowwise", "blockwise"), "mxfp8": ("mxfp8",)}


def check_dispatch_dtype(c: Settings) -> Errors:
    """Check tokens that are sent to their experts in fp8."""
    dtype = c.parallel.moe_dispatch_fwd_dtype
    recipes = _DISPATCHED.get(dtype, ())
    if dtype == "bf16" or (c.has_fp8 and c.fp8.recipe in recipes):
        return
    recipe = f"fp8_recipe {c.fp8.recipe}" if c.has_fp8 else "products in params_dtype"
    yield ConfigError(
        f"moe_dispatch_fwd_dtype {dtype} with {recipe}",
        why="tokens are sent as their experts multiply them, with scales of blocks of a token",
        fix=f"set --fp8-format e4m3 and --fp8-recipe {recipes[-1]}, or leave "
        "--moe-dispatch-fwd-dtype out",
    )


def check_deep_ep(c: Settings) -> Errors:
    """Check layouts in which DeepEP sends the tokens."""
    if not c.parallel.uses_deep_ep:
        return
    name = "moe_flex_dispatcher_backend deepep"
    others = ("moe_hierarchical_dispatch", "moe_expert_rank_capacity_factor")
    for other in others:
        if getattr(c.parallel, other) is not None:
            yield ConfigError(
                f"{name} with {other}",
                why="each is another way to send tokens to experts",
                fix=f"leave --moe-flex-dispatcher-backend or --{other.replace('_', '-')} out",
            )
    dtype = c.parallel.moe_dispatch_fwd_dtype
    if dtype != "bf16":
        yield ConfigError(
            f"{name} with moe_dispatch_fwd_dtype {dtype}",
            why="DeepEP is called with tokens in bf16",
            fix="leave --moe-dispatch-fwd-dtype or --moe-flex-dispatcher-backend out",
        )
    if c.etp > 1:
        yield ConfigError(
            f"{name} with expert_tensor_parallel_size {c.etp}",
            why="DeepEP sends a token to the one rank that holds an expert",
            fix="set --expert-tensor-parallel-size 1",
        )
    if c.precision.params_dtype != "bf16":
        yield ConfigError(
            f"{name} with params_dtype {c.precision.params_dtype}",
            why="DeepEP's kernels send bf16",
            fix="set --params-dtype bf16",
        )


def check_expert_width(c: Settings) -> Errors:
    """Check width of an expert over its tensor-parallel ranks."""
    width = c.model.moe_ffn_size
    if c.has_experts and width % c.etp != 0:
        yield ConfigError(
            f"an expert of width {width} cannot be shared by etp={c.etp} ranks",
            why="expert_tensor_parallel_size (unset: as tensor_model_parallel_size) must divide "
            "moe_ffn_hidden_size",
            fix="set --expert-tensor-parallel-size 1 or --moe-ffn-hidden-size "
            f"{round_up(width, c.etp)}",
        )
