"""Where things are: state on holders and their owners, memory, communication groups, and transfers between layouts."""
