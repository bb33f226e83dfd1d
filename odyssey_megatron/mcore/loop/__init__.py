"""Megatron-LM's training loop, which stays its own: set-up, steps, logs and checkpoints."""
