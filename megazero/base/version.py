"""Define the version; in this package, because all others may import it."""

__version__ = "0.1.0"
