"""The decorator was forgotten."""


class ZeroHooks:
    def prefer_cross_layer_blocks(self, context):
        return True


policy = ZeroHooks()
