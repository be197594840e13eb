"""Tasks: from data to batches, from batches to a loss, and from a trained model to an answer."""
