"""The built-in plugins. They join through entry points, like anyone's."""
