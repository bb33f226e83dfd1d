"""Transformer Engine's own Python modules on a CPU, with torch operations in place of its compiled kernels."""
