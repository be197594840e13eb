"""Documents, the memory-mapped token store, and what a model must beat."""
