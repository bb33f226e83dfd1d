"""What agents, ranks and the coordinator tell each other: a sealed store, leases, requests, and the verdict."""
