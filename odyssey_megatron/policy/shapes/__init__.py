"""The search for pipelines: how many, of which lengths, cut where, and with how many microbatches each."""
