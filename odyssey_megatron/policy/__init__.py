"""Deciding: policies, search, score, and a job's planner on top of them. Pure: no torch, no clock, no environment."""
