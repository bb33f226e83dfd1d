"""A generation on its way to the ranks: what all read, and what each one reads."""
