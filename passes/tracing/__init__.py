"""From a model to a Trace: one joint graph of a microbatch, with costs."""
