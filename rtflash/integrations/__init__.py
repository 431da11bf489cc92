"""rtflash inside other packages; each module is imported by whoever uses it."""
