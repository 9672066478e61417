"""Its installation lost METADATA, as half an uninstallation leaves it."""

import kvpolicy


class NoMetadata:
    @kvpolicy.hookimpl
    def prefer_cross_layer_blocks(self):
        return None


policy = NoMetadata()
