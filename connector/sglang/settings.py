"""Options of the adapter: the object `cachesvc` in ``--hicache-storage-backend-extra-config``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from cachesvc.connector.settings import AdapterSettings

SECTION: Final = "cachesvc"


@dataclass(frozen=True)
class Settings(AdapterSettings):
    """Options of the adapter, beside those of every adapter.

    lookups_kept: answers that wait for the pages to be fetched; the oldest are given up.
    """

    lookups_kept: int = 256


def parse_settings(extra_config: Mapping[str, Any] | None) -> Settings:
    """Raises `ValueError` for what makes no sense."""
    given = (extra_config or {}).get(SECTION) or {}
    if not isinstance(given, Mapping):
        raise ValueError(f"{SECTION} is {given!r}; it must be an object with options")
    settings = Settings.parse(given, SECTION)
    if settings.lookups_kept < 1:
        raise ValueError(f"lookups_kept is {settings.lookups_kept}; it must be positive")
    return settings
