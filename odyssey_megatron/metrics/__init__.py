"""Records of what happened: the journal (JSON lines) and the report made from it."""
