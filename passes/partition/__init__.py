"""From a Trace and a Machine to a Partition: who holds what."""
