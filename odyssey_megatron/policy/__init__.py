"""Deciding: candidates, search and score. Pure: no torch, no clock, no environment."""
