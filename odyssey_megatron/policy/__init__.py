"""Deciding: the policies, search, score, and a job's planner over them. Pure: no torch, no clock, no environment."""
