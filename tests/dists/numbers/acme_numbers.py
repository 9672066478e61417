"""An entry point that leads to a number."""

policy = 42
