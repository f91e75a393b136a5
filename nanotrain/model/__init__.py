"""GPT models: transformer stages with dense or mixture-of-experts layers, built from declared
parameters.

Not here: the declarations themselves (topology/), sharded layers and collectives (parallel/),
storage (parallel/dp/).
"""
