"""The steps: one a file, a folder a level, in the order data flows."""
