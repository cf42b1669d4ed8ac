"""What the commands of `pdcompiler` do, apart from planning (`cli.py`)."""
