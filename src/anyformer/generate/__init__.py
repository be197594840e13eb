"""Generate: from a model and a prompt to new tokens and text."""
