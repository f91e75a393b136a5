"""`prove`: layouts that hold are proved, and mistakes planted in a run are found."""

import pytest

from nanotrain.cli.dry_run import complete
from nanotrain.config.flags import parse
from nanotrain.config.load import load_line
from nanotrain.prove.axes import Untypable
from nanotrain.prove.check import Proof, prove, verdict

DENSE = "+config=tiny --vocab-size 512"
EXPERTS = "+config=tiny_moe --vocab-size 512"
TP = "--tensor-model-parallel-size 2"
SP = f"{TP} --sequence-parallel"
OPTIM = "--data-parallel-sharding-strategy optim"
MUON = f"{OPTIM} --optimizer muon"
# the numbers of its indexer are equal over tp
SPARSE = "--multi-latent-attention --q-lora-rank 32 --experimental-attention-variant dsa"
# keys and keys of the index, whose gradients are partial and equal over tp, are gathered together
GATHERED = "--context-parallel-size 2 --cp-comm-type allgather"
# a stage sends keys and values, of the heads of a tp rank, and inputs of layers, which are equal
INPUTS = (
    "--num-layers 4 --num-kv-shared-layers 2 --layer-input-size 8 --num-query-groups 4 "
    "--window-size 4 --window-attn-skip-freq 2"
)
AVERAGE = "--ddp-average-in-collective"
# summed by an all-to-all and a local sum
BF16_GRADS = "--bf16 --grad-reduce-in-bf16 --reduce-scatter-with-fp32-accumulation"


def proof_of(line: str, world_size: int) -> Proof:
    return prove(complete(load_line(parse(line.split()))), world_size)


@pytest.mark.parametrize(
    ("line", "world_size"),
    [
        (f"{DENSE} {SP} --data-parallel-sharding-strategy optim_grads_params", 8),
        (f"{DENSE} {TP} --pipeline-model-parallel-size 2 --context-parallel-size 2", 8),
        (f"{EXPERTS} {SP} --expert-model-parallel-size 4 --expert-tensor-parallel-size 1", 8),
        (f"{EXPERTS} {MUON} --num-distributed-optimizer-instances 2 {AVERAGE}", 8),
        (f"{DENSE} {TP} {SPARSE} --dsa-indexer-loss-coeff 0.01", 4),
        (f"{DENSE} {TP} {SPARSE} --dsa-indexer-loss-coeff 0.01 {GATHERED}", 8),
        (f"{EXPERTS} {TP} --add-bias-linear", 4),
        (f"{DENSE} {TP} {INPUTS} --pipeline-model-parallel-size 2", 8),
        (f"{DENSE} {SP} {OPTIM} --invariant", 8),
        (f"{DENSE} {TP} {BF16_GRADS} --data-parallel-sharding-strategy optim_grads", 8),
    ],
)
def test_a_layout_is_proved(line: str, world_size: int) -> None:
    proof = proof_of(line, world_size)
    assert not proof.faults
    assert proof.num_sums > len(proof.parameters) > 6
    assert "proved: the gradients of" in proof.text()


def test_invariant_experts_are_refused() -> None:
    line = f"{EXPERTS} --invariant"
    with pytest.raises(Untypable, match="the host reads how many tokens each expert has"):
        proof_of(line, 4)
    assert verdict(load_line(parse(line.split())), 4)[1].startswith("not proved: invariant layers")


def test_a_rank_of_thousands_is_proved() -> None:
    line = f"{DENSE} {SP} {OPTIM} --pipeline-model-parallel-size 2 --global-batch-size 4096"
    proof = proof_of(line, 16384)
    assert not proof.faults
    assert proof.text().startswith("16,384 ranks: 2 ranks of a small model typed")
