"""Parts: a spec class and its module side by side, one idea a file."""
