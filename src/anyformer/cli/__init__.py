"""The command line: `commands` reads what the user wants, the other files do it and show it."""
