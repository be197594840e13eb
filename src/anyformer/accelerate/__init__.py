"""Accelerate: speed that is put on a built model from outside. The parts know nothing of it."""
