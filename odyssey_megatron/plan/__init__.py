"""Layouts, schedules and plans as data, and the pure functions over them."""
