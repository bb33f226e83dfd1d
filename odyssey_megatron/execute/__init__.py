"""Carrying out a schedule: the interpreter, its messages, and the commit of a step. Without Megatron."""
