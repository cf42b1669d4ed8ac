"""Compile a PyTorch model into one pipeline-parallel program per rank."""
