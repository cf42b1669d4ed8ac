"""Rewrites of one rank's program, after the split."""
