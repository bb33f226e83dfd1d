"""Looking at a job from outside, by its run folder: in a terminal, as a page, and as metrics. Changes nothing
in it.
"""
