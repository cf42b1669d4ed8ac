"""Schedules: which stage works on which microbatch, in which order."""
