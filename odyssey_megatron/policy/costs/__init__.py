"""What layers, messages and communicators cost: estimated from sizes, then measured by the ranks."""
