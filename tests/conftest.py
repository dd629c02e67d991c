"""How property tests draw: the same examples in every default run, new ones in the full run; `--on`, see tests/device."""

from hypothesis import settings

settings.register_profile("steady", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None, max_examples=500)


def pytest_addoption(parser):
    parser.addoption("--on", help="what ranks do is done on a device of this kind: see tests/device")


def pytest_configure(config):
    settings.load_profile("search" if "full or not full" in config.option.markexpr else "steady")
    if config.option.on:
        from tests.device.running import put_all_on

        put_all_on(config.option.on)
