"""Check: the promises that any Transformer makes, measured."""
