"""Schedules: who does what, in what order. Pure Python, never imports torch."""
