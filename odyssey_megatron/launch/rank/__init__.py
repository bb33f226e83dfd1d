"""The side of a rank: it learns of generations, reports failures, and injects faults that were asked for."""
