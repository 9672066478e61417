"""Its entry point is no reference to an object."""
