"""``kv_connector_extra_config``: what can be set, checked when the engine starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cachesvc.connector.settings import AdapterSettings


@dataclass(frozen=True)
class Settings(AdapterSettings):
    """Options of the connector, beside those of every adapter.

    save_decoded: save the blocks of answers too, since the next turn resends them.
    decline_slow_loads: compute instead of loading when that is predicted to be faster.
    load_threads: loads that run side by side in a worker.
    """

    save_decoded: bool = True
    decline_slow_loads: bool = True
    load_threads: int = 2


def parse_settings(config: Mapping[str, Any]) -> Settings:
    """Raises `ValueError` for an unknown option or a value of the wrong kind."""
    settings = Settings.parse(config, "kv_connector_extra_config")
    if settings.load_threads < 1:
        raise ValueError(f"load_threads is {settings.load_threads}; it must be positive")
    return settings
