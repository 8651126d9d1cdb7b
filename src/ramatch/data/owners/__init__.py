"""Data sets as their owners distribute them, one module each: `load(root) -> Owned`."""
