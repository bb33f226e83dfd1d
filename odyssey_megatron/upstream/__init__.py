"""What is known of Megatron-LM without running it: its source, seams, arguments and versions. Needs no torch."""
