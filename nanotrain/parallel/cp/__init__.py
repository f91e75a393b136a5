"""Context parallelism: sequences sharded over the cp group, and the core attentions that work on such shards.

Projections, RoPE and masks of the model are in `nanotrain.model`; which tokens a batch holds is `nanotrain.data`.
"""
