"""``odyssey doctor``: what would keep a job from running here, or from surviving, before it is started.

Only ``command`` looks at this machine: for all other modules environment, packages and paths are arguments.
Neither torch nor Megatron is imported.
"""
