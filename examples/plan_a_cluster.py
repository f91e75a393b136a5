"""Plan a cluster on a laptop: memory per rank and tp groups that cross nodes, for every tp x pp.

    python examples/plan_a_cluster.py --nodes 16 --gpus-per-node 8 --memory-gib 80

Uses only nanotrain.topology and nanotrain.config: pure functions without torch, for any world size.
"""

import argparse
from dataclasses import dataclass, replace
from itertools import product

from nanotrain.config.model import ModelConfig
from nanotrain.config.parallel import ParallelConfig
from nanotrain.errors import TopologyError
from nanotrain.spec.counts import num_parameters
from nanotrain.spec.shape import ModelShape
from nanotrain.spec.stages import split_layers
from nanotrain.topology.topology import Topology

LLAMA_70B = ModelConfig(
    num_layers=80,
    hidden_size=8192,
    ffn_hidden_size=28672,
    num_attention_heads=64,
    num_query_groups=8,
    vocab_size=32000,
    untie_embeddings_and_output_weights=True,
)
# Bytes per bf16 parameter: the parameter, its fp32 gradient, its main param and moments.
PARAM_BYTES, GRAD_BYTES, STATE_BYTES = 2, 4, 12


@dataclass(frozen=True)
class Plan:
    """One layout of the ranks."""

    tp: int
    pp: int
    dp: int
    gib: float
    crosses_nodes: bool


def plan(model: ModelConfig, *, world_size: int, node: int, tp: int, pp: int) -> Plan:
    """Compute the layout and the resident bytes of the largest rank with ZeRO-1.

    Raises:
        TopologyError: the sizes do not divide the world, or there are fewer layers than stages.
    """
    zero1 = ParallelConfig(data_parallel_sharding_strategy="optim")
    parallel = replace(zero1, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    topology = Topology.of(parallel, world_size)
    longest_stage = max(len(stage.layers) for stage in split_layers(model.num_layers, pp))
    num_params = num_parameters(ModelShape.of(model)) * longest_stage / model.num_layers / tp
    size = num_params * (PARAM_BYTES + GRAD_BYTES + STATE_BYTES / topology.size("dp_shard"))
    crosses = any(group[0] // node != group[-1] // node for group in topology.groups_of("tp"))
    return Plan(tp, pp, topology.size("dp"), size / 2**30, crosses)


def main() -> None:
    """Print every layout that the ranks can form."""
    parser = argparse.ArgumentParser(description="Plan a cluster")
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--memory-gib", type=float, default=80)
    args = parser.parse_args()
    print(" tp  pp   dp   GiB of state")
    node = args.gpus_per_node
    for tp, pp in product((1, 2, 4, 8, 16), (1, 2, 4, 8)):
        try:
            it = plan(LLAMA_70B, world_size=args.nodes * node, node=node, tp=tp, pp=pp)
        except TopologyError as error:
            print(f"{tp:3} {pp:3}    -   {error.what}")
            continue
        remark = (
            "tp crosses nodes"
            if it.crosses_nodes
            else ""
            if it.gib < args.memory_gib
            else "does not fit"
        )
        print(f"{it.tp:3} {it.pp:3} {it.dp:4} {it.gib:10.1f}   {remark}".rstrip())


if __name__ == "__main__":
    main()
