"""From routes to the programs of all workers, and to what is left of them after a failure."""
