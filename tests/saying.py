"""What calls return or raise, as text: for snapshots of messages."""


def said(calls):
    """Name -> what its call returned, or the exception with its message."""
    found = {}
    for name, call in calls.items():
        try:
            found[name] = f"returned {call()}"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found
