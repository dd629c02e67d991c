"""A directory of inductor's own for a test of caches."""


def own_cache(directory: str) -> dict[str, str]:
    """The environment of such a test."""
    return {"TORCHINDUCTOR_CACHE_DIR": directory}
