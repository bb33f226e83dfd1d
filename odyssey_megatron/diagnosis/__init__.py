"""Who is slow, and why: from times of instructions to verdicts with their evidence. Pure functions."""
