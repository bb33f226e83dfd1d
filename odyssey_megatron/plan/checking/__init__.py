"""Whether a schedule does what its layout says, how long it takes, how long it must take, and how it looks; and whether
the state that a plan counts on is there.
"""
