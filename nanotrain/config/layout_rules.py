"""Rules between the model and its layout: what every axis cuts must come out even.

Heads, MLP width and vocabulary rows by tp, the sequence by cp (twice: zigzag) and again by tp with sequence_parallel,
layers by pp, experts by ep and the width of each by etp.
"""

from math import lcm

from nanotrain.config.config import Config, ParallelConfig
from nanotrain.config.derive import ffn_size, moe_ffn_size, moe_layers, padded_vocab_size, query_groups
from nanotrain.errors import ConfigError


def check_layout(config: Config) -> None:
    """Check that the model can be cut as asked.

    Raises:
        ConfigError: the first axis that does not divide what it cuts.
    """
    for rule in (check_tensor, check_vocabulary, check_sequence, check_context, check_stages, check_experts):
        rule(config)


def check_tensor(config: Config) -> None:
    """Tensor-parallel ranks share heads and the MLP evenly; key/value heads are shared or repeated evenly."""
    model_config, tp = config.model, config.parallel.tensor_model_parallel_size
    if model_config.num_attention_heads % tp:
        raise uneven("num_attention_heads", model_config.num_attention_heads, tp=tp)
    groups = query_groups(model_config)
    if not model_config.multi_latent_attention and groups % tp and tp % groups:
        raise ConfigError(
            f"{groups} key/value heads (num_query_groups) cannot be shared by tp={tp} ranks",
            why="a rank holds several whole heads, or several ranks hold the same one",
            fix=f"set --num-query-groups or --tensor-model-parallel-size so that one divides the other, "
            f"as --num-query-groups {tp}",
        )
    layers = moe_layers(model_config)
    if not all(layers) and ffn_size(model_config) % tp:
        raise uneven("ffn_hidden_size", ffn_size(model_config), tp=tp)
    shared = model_config.moe.shared_expert_intermediate_size
    if shared is not None and any(layers) and shared % tp:
        raise uneven("moe_shared_expert_intermediate_size", shared, tp=tp)


def uneven(name: str, size: int, *, tp: int) -> ConfigError:
    """The error for a size that tensor-parallel ranks cannot share."""
    return ConfigError(
        f"{name} {size} cannot be shared by tp={tp} ranks",
        why="tensor_model_parallel_size must divide it",
        fix=f"set --{name.replace('_', '-')} {-(-size // tp) * tp} or another --tensor-model-parallel-size",
    )


def check_vocabulary(config: Config) -> None:
    """Tensor-parallel ranks share the rows of the padded vocabulary; one that is not known yet fits by its padding."""
    model_config, tp = config.model, config.parallel.tensor_model_parallel_size
    multiple = model_config.make_vocab_size_divisible_by
    rows = multiple if model_config.vocab_size is None else padded_vocab_size(model_config)
    if rows % tp:
        raise ConfigError(
            f"a vocabulary padded to a multiple of {multiple} cannot be shared by tp={tp} ranks",
            why=f"they would share {rows} rows",
            fix=f"set --make-vocab-size-divisible-by {lcm(multiple, tp)}",
        )


def check_sequence(config: Config) -> None:
    """Every part of a sequence is as long as every other."""
    parallel, length = config.parallel, config.data.seq_length
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    reasons, unit = [], 1
    if cp > 1:
        unit = 2 * cp
        reasons.append(f"cp={cp} ranks hold two chunks each")
    if tp > 1 and (parallel.sequence_parallel or config.model.moe.num_experts is not None):
        unit = lcm(unit, tp * cp)
        what = "sequence_parallel" if parallel.sequence_parallel else "a layer with experts"
        reasons.append(f"{what} cuts a part among tp={tp} ranks")
    if length % unit:
        raise ConfigError(
            f"seq_length {length} cannot be cut into {unit} parts",
            why=" and ".join(reasons),
            fix=f"set --seq-length {-(-length // unit) * unit}",
        )


def check_context(config: Config) -> None:
    """All-to-all gives every context-parallel rank whole heads."""
    parallel, heads = config.parallel, config.model.num_attention_heads
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    if parallel.cp_comm_type == "a2a" and heads % (tp * cp):
        raise ConfigError(
            f"{heads} attention heads cannot be exchanged among cp={cp} ranks",
            why=f"cp_comm_type a2a needs tp*cp = {tp * cp} to divide num_attention_heads",
            fix=f"set --cp-comm-type p2p or --num-attention-heads {-(-heads // (tp * cp)) * tp * cp}",
        )


def check_stages(config: Config) -> None:
    """Every stage has a layer, and the schedule fits the stages."""
    parallel, num_layers = config.parallel, config.model.num_layers
    pp, virtual = parallel.pipeline_model_parallel_size, parallel.num_virtual_stages_per_pipeline_rank
    if num_layers < pp * virtual:
        stages = f"pp={pp}" if virtual == 1 else f"pp={pp} x {virtual} = {pp * virtual}"
        raise ConfigError(
            f"{num_layers} layers cannot fill {stages} pipeline stages",
            why="every stage holds at least one layer",
            fix=f"set --num-layers {pp * virtual} or a smaller --pipeline-model-parallel-size",
        )
    if parallel.decoder_first_pipeline_num_layers or parallel.decoder_last_pipeline_num_layers:
        check_uneven_stages(parallel, num_layers)


def check_uneven_stages(parallel: ParallelConfig, num_layers: int) -> None:
    """The first and the last stage leave at least one layer for each of the others."""
    pp, sizes = parallel.pipeline_model_parallel_size, []
    for end in ("first", "last"):
        if (size := getattr(parallel, f"decoder_{end}_pipeline_num_layers")) is not None:
            sizes.append(size)
    flags = "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers"
    if parallel.num_virtual_stages_per_pipeline_rank > 1:
        raise ConfigError(
            f"{flags} with {parallel.num_virtual_stages_per_pipeline_rank} virtual stages per pipeline rank",
            why="the first and the last stage are only one of the stages of their rank",
            fix=f"leave {flags} out, or set --num-virtual-stages-per-pipeline-rank 1",
        )
    left, stages = num_layers - sum(sizes), pp - len(sizes)
    if (stages and left >= stages) or (not stages and not left):
        return
    taken = " + ".join(map(str, sizes))
    raise ConfigError(
        f"{left} layers are left for {stages} of pp={pp} pipeline stages",
        why=f"of {num_layers} layers the ends take {taken}, and every other stage holds at least one",
        fix=f"change {flags} so that they leave {f'at least {stages}' if stages else 'none'}",
    )


def check_experts(config: Config) -> None:
    """Expert-parallel ranks share the experts, expert-tensor-parallel ranks the width of each."""
    model_config, parallel = config.model, config.parallel
    ep, etp = parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size
    num_experts = model_config.moe.num_experts
    if num_experts is None:
        for name, size in (("expert_model_parallel_size", ep), ("expert_tensor_parallel_size", etp or 1)):
            if size > 1:
                raise ConfigError(
                    f"{name} {size} has no effect",
                    why="the model has no experts: num_experts is unset",
                    fix=f"set --num-experts or leave --{name.replace('_', '-')} out",
                )
        return
    if num_experts % ep:
        raise ConfigError(
            f"{num_experts} experts cannot be shared by ep={ep} ranks",
            why="expert_model_parallel_size must divide num_experts",
            fix=f"set --num-experts {-(-num_experts // ep) * ep} or another --expert-model-parallel-size",
        )
    width, etp = moe_ffn_size(model_config), etp or parallel.tensor_model_parallel_size
    if width % etp:
        unset = "" if parallel.expert_tensor_parallel_size else " (unset: as tensor_model_parallel_size)"
        raise ConfigError(
            f"an expert of width {width} cannot be shared by etp={etp} ranks",
            why=f"expert_tensor_parallel_size{unset} must divide moe_ffn_hidden_size",
            fix=f"set --expert-tensor-parallel-size 1 or --moe-ffn-hidden-size {-(-width // etp) * etp}",
        )
