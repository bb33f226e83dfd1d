"""Launcher, coordinator, agent, heartbeat and fault injection."""
