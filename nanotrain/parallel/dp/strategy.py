"""What the data-parallel ranks share, as traits: everything else follows from these and no code asks for a name."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Strategy:
    """The traits of a `--data-parallel-sharding-strategy`.

    Attributes:
        shard_optim: main weights and moments are cut among the shard group (ZeRO-1; Rajbhandari et al. 2020, 5.1).
        shard_grads: so are gradients; a full-size gradient never exists (ZeRO-2; 5.2).
    """

    shard_optim: bool
    shard_grads: bool


STRATEGIES = {
    "no_shard": Strategy(shard_optim=False, shard_grads=False),
    "optim": Strategy(shard_optim=True, shard_grads=False),
    "optim_grads": Strategy(shard_optim=True, shard_grads=True),
}
