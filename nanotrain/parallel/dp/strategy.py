"""Sharding strategies as traits; no other code compares strategy names."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Strategy:
    """What a `--data-parallel-sharding-strategy` shards."""

    # main params and optimizer state are sharded over the shard group (ZeRO-1; Rajbhandari et al. 2020, section 5.1).
    shard_optim: bool
    shard_grads: bool  # gradients are sharded too and never stored at full size (ZeRO-2; section 5.2)
    shard_params: bool  # parameters are sharded too and all-gathered per unit (ZeRO-3; section 5.3)

    @property
    def gathers_by_unit(self) -> bool:
        """Whether parameters are all-gathered per FSDP unit; then no bucket may span two units."""
        return self.shard_params


STRATEGIES = {
    "no_shard": Strategy(shard_optim=False, shard_grads=False, shard_params=False),
    "optim": Strategy(shard_optim=True, shard_grads=False, shard_params=False),
    "optim_grads": Strategy(shard_optim=True, shard_grads=True, shard_params=False),
    "optim_grads_params": Strategy(shard_optim=True, shard_grads=True, shard_params=True),
}
