"""``odyssey doctor``: what would keep a job from surviving here, before it is started.

Pure but for ``command``: environment, packages and paths are arguments, and neither torch nor Megatron is imported.
"""
