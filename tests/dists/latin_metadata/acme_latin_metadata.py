"""Its METADATA is written in Latin-1, and so cannot be read."""

import kvpolicy


class LatinMetadata:
    @kvpolicy.hookimpl
    def prefer_cross_layer_blocks(self):
        return None


policy = LatinMetadata()
