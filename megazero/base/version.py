"""Name the version; here, because everything may import this room."""

__version__ = "0.1.0"
