"""Inspect: look at models and runs: trees with costs, masks, loss curves, the machine's limits."""
