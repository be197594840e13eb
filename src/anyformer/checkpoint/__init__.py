"""Checkpoints: models on disk."""
