"""A hook marked for another project."""

import pluggy

hookimpl = pluggy.HookimplMarker("acme")


class WrongMarker:
    @hookimpl
    def prefer_cross_layer_blocks(self, context):
        return True


policy = WrongMarker()
