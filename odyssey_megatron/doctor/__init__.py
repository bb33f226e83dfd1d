"""``odyssey doctor``: what would keep a job from running here, or from surviving, before it is started.

All modules but ``command`` are pure: environment, packages and paths are arguments. Neither torch nor
Megatron is imported.
"""
