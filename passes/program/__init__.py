"""From Stages and a Schedule to one Program over all ranks, its rewrites, and its split."""
