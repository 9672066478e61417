"""A script, published as a plugin."""

raise SystemExit("usage: acme COMMAND")
