"""Its entry_points.txt is no list of name = value."""
