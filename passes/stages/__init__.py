"""From a Trace and a Partition to Stages, and rewrites of a stage's graphs."""
