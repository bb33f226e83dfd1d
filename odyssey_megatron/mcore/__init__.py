"""The only package that runs Megatron: how Odyssey enters a process, and its device; ``loop`` and ``model`` have the
rest.
"""
