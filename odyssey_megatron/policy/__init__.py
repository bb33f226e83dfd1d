"""Deciding, and a job's planner on top of it. Pure: no torch, no clock, no environment.

``decide.py`` goes from a ``Case`` by what ``policies/`` propose (``options.py``) to the best of it (``contest.py``,
``score.py``), with reasons; ``planner.py`` does so for a job whose costs it learns. The rooms:

- ``policies/``: what to do about a loss or slowness, a file for each way.
- ``shapes/``: the search for pipelines of any lengths.
- ``routes/``: ways of microbatches around workers and links, where layers stay.
- ``costs/``: what layers and messages cost, estimated and then measured.
"""
