"""A plugin whose native library is not there."""

raise ImportError("libacme.so.3: cannot open shared object file")
