"""Training: a loop that knows nothing of the task it trains."""
