"""The agent of a node: it starts ranks, watches them, and starts them again. The first one hosts the job."""
