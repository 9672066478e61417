"""What keeps the plugin from being used."""

from __future__ import annotations


class Unavailable(ImportError):
    """numba or the processor cannot do it; kvpolicy lists the plugin with this reason."""
