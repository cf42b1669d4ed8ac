"""The meanings: what a program does when it runs."""
