"""Plugins: found without import, loaded one by one, rehearsed, ordered by priority."""

from kvpolicy.plugins.loading import Plugin, PluginInfo, PluginSet, Status, load_plugins
from kvpolicy.plugins.selection import Selection, parse_priorities, select

__all__ = [
    "Plugin",
    "PluginInfo",
    "PluginSet",
    "Selection",
    "Status",
    "load_plugins",
    "parse_priorities",
    "select",
]
