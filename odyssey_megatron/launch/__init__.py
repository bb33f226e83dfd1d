"""Starting a job and keeping its membership.

``run.py`` and ``host.py`` are commands that start a job, with ``line.py`` (their arguments) and ``shim.py`` (other
launchers); ``inject.py`` and ``readmit.py`` are commands that reach a running one. The rooms:

- ``agent/``: the agent of a node, which starts its ranks and watches them. One of the agents hosts the job.
- ``coordinator/``: the thread in the job's host that decides what happens.
- ``rank/``: a rank's side: what it hears, and what it reports.
- ``wire/``: what they tell each other, and how.
- ``process/``: what concerns one process of a machine, whatever its job: signals, locks, heartbeats, output, forks.
"""
