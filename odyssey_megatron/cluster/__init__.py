"""Who is there: ids, events, and the pure state machine of membership. Standard library only."""
