"""A module to preload: Transformer Engine, offered before whatever imports Megatron."""

from tests.te.offer import offer

offer()
