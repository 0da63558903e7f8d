"""Names of images with a place for the task, as `runtime.image` has them."""

from __future__ import annotations

from agent_flow.config import ConfigFile
from agent_flow.errors import ConfigError

_PLACE = "{instance_id}"


def check_image_name(image: str, file: ConfigFile, example: str) -> None:
    """Raises: ConfigError: `runtime.image` has another place than `{instance_id}`."""
    if "{" in image.replace(_PLACE, ""):
        raise ConfigError(
            f"runtime.image {image!r} has a place that is not {_PLACE}",
            where=file.where(("runtime", "image")),
            fix=example,
        )


def image_of(image: str, name: str) -> str:
    """The name for a task; registries want it in lower case."""
    return image.replace(_PLACE, name.lower())
