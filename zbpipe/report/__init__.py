"""Pictures of timelines for people."""
