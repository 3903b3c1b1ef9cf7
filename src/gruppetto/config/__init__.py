"""Config: the typed schema, the loader, and the recipes."""
