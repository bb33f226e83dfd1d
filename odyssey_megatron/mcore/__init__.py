"""The only folder that knows Megatron."""
