"""Getting the survivors into a new generation: abort, agree, groups, state transfer. No Megatron."""
