"""The only folder that runs Megatron: how Odyssey enters a process, and its device; loop and model are rooms."""
