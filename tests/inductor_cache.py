"""A directory of inductor's own for a test of caches."""


def own_cache(directory: str) -> dict[str, str]:
    """The environment of such a test; vector instructions, which inductor tries out for each new directory, are off."""
    return {"TORCHINDUCTOR_CACHE_DIR": directory, "TORCHINDUCTOR_VEC_ISA_OK": "0"}
