"""A misspelt hook that says it may be unknown; it would never be called."""

import kvpolicy


class MisspeltOptionalHook:
    @kvpolicy.hookimpl(optionalhook=True)
    def register_layer(self, context):
        return None


policy = MisspeltOptionalHook()
