"""How property tests draw: the same examples in every default run, new ones in the full run."""

from hypothesis import settings

settings.register_profile("steady", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None, max_examples=500)


def pytest_configure(config):
    settings.load_profile("search" if "full or not full" in config.option.markexpr else "steady")
