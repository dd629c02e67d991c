"""JSON of a checkpoint: an object, no name twice, any damage said in one error."""

import json
from pathlib import Path
from typing import Any

from torchshard.checkpoint.text import printable
from torchshard.errors import CheckpointError


def parse(data: bytes, what: str, path: Path) -> dict[str, Any]:
    """The object.

    Args:
        data: UTF-8.
        what: it is, for errors: "safetensors header".
        path: of the file.

    Raises:
        CheckpointError: damaged, not an object, or a name occurs twice.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(found := dict(pairs)) != len(pairs):
            raise ValueError("a name occurs twice")
        return found

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"The {what} is damaged.", got=printable(str(error)), where=path) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"The {what} is not an object.", got=printable(value), where=path)
    return value
