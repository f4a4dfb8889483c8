"""The release of ftbert."""

__version__ = "0.1.0"
