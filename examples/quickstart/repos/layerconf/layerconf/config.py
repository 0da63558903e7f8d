"""The layers of one application."""

from collections.abc import Mapping

from layerconf.merge import Layer, merge


class ConfigError(ValueError):
    """A profile that does not exist."""


class Config:
    """Defaults and named profiles, from which settings are resolved as often as needed."""

    def __init__(self, defaults: Layer, profiles: Mapping[str, Layer] | None = None) -> None:
        self.defaults = defaults
        self.profiles = dict(profiles or {})

    def resolve(self, profile: str | None = None, *overrides: Layer) -> Layer:
        """Return the settings of a profile, with ``overrides`` on top in order.

        Raises:
            ConfigError: if there is no such profile.
        """
        layers = list(overrides)
        if profile is not None:
            if profile not in self.profiles:
                known = ", ".join(sorted(self.profiles)) or "none"
                raise ConfigError(f"no profile {profile!r}; known: {known}")
            layers.insert(0, self.profiles[profile])
        settings = dict(self.defaults)
        for layer in layers:
            settings = merge(settings, layer)
        return settings

    def differences(self, one: str, other: str) -> list[str]:
        """Return the dotted names of the settings that differ between two profiles, sorted."""
        left, right = _flatten(self.resolve(one)), _flatten(self.resolve(other))
        return sorted(name for name in left.keys() | right.keys() if left.get(name) != right.get(name))


def _flatten(layer: Layer, prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in layer.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
