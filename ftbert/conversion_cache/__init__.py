"""Opens checkpoints through a cache of converted ones: a foreign file is converted once."""

from ftbert.conversion_cache.cache import open_cached

__all__ = ["open_cached"]
