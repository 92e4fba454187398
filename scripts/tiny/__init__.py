"""The parts of scripts/train_tiny.py, from text to weights."""
