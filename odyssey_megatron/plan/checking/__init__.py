"""Whether a schedule does what its layout says, how long it takes, how long it must take, and how it looks."""
