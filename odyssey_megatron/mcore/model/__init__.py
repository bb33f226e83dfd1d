"""What a worker computes with: its layers as Megatron's modules, their gradients, optimizer and random numbers."""
