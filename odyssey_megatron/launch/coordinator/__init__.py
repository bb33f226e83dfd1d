"""The coordinator: from what agents and ranks report to the generations of the job."""
