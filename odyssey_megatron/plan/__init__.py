"""Layouts, schedules and plans as data, and the pure functions over them.

A ``Plan`` is a ``Layout`` (holders and routes), a ``Schedule`` (each worker's instructions) and transfers, all timed by
``Costs``. The rooms:

- ``placing/``: where state is and who owns it, memory, communication groups, transfers.
- ``scheduling/``: from routes to programs, and to what is left of them in an interrupted step.
- ``checking/``: ``verify()``, ``check_units()``, bounds, and the simulator.
- ``sending/``: a generation, as it is published and as each rank reads it.
"""
