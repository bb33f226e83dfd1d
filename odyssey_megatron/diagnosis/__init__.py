"""Diagnosis: who is slow, and why, from times of instructions to verdicts with evidence. Pure functions."""
