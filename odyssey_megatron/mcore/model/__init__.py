"""What a worker computes with: its layers as Megatron's modules, their gradients, optimizers and random numbers."""
