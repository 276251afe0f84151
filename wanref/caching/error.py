"""What caches refuse with."""


class CacheError(ValueError):
    """A cache was asked for something that it cannot honour, or a reuse would have been of a foreign residual."""
