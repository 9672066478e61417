"""Its entry point names an object that the module does not have."""
