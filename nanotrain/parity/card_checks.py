"""The checks of a card, in their order; without torch, for the command line."""

BESIDE_TRANSFORMERS = ("conversion", "logits and gradients")
CHECKS = (*BESIDE_TRANSFORMERS, "layouts", "resume", "plan", "curve")
