"""What concerns one process of a machine, whatever its job: signals, locks, heartbeats, output, forks."""
