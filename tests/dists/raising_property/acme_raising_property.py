"""A priority that is read from a file which is not there."""

import kvpolicy


class RaisingProperty:
    @property
    def priority(self):
        raise OSError("no such file: acme.toml")

    @kvpolicy.hookimpl
    def prefer_cross_layer_blocks(self, context):
        return True


policy = RaisingProperty()
