"""Odyssey's work inside Megatron-LM's training loop, which stays Megatron's: setup, steps, logs and checkpoints."""
