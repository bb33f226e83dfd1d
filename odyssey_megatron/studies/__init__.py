"""Answers without a job: ``odyssey plan``, ``odyssey simulate``, and other systems to compare with."""
