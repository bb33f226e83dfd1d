"""A job looked at from outside, by its run folder: in a terminal, as a page, and as metrics. Changes nothing of it."""
