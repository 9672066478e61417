"""Plugins: found without import, loaded one by one, rehearsed, ordered by priority."""

from kvpolicy.plugins.discovery import PluginInfo, Status, plugin_names
from kvpolicy.plugins.loading import Plugin, PluginSet, load_plugins
from kvpolicy.plugins.selection import Selection, parse_priorities, select

__all__ = [
    "Plugin",
    "PluginInfo",
    "PluginSet",
    "Selection",
    "Status",
    "load_plugins",
    "parse_priorities",
    "plugin_names",
    "select",
]
