"""The cluster: cells of ranks, events, and membership as a pure state machine. Standard library only."""
