"""Plugins: found without import, loaded one by one, rehearsed, ordered by priority."""

from kvpolicy.plugins.discovery import PluginInfo, plugin_names
from kvpolicy.plugins.loading import Plugin, PluginSet, load_plugins
from kvpolicy.plugins.selection import parse_priorities, select

__all__ = [
    "Plugin",
    "PluginInfo",
    "PluginSet",
    "load_plugins",
    "parse_priorities",
    "plugin_names",
    "select",
]
