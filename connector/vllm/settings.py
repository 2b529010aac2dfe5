"""``kv_connector_extra_config``: what can be set, checked when the engine starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from cachesvc.connector.options import CacheOptions
from cachesvc.rpc.address import client_address


@dataclass(frozen=True)
class Settings:
    """Options of the connector; those of `CacheOptions` may be given beside them, by their names.

    address: of the daemon; without one ``CACHESVC_ADDRESS``, else the user's own daemon.
    traffic_class: of requests that name none.
    revision: names the weights. Without one they are digested when the engine starts.
    save_decoded: save the blocks of answers too, since the next turn resends them.
    decline_slow_loads: compute instead of loading when that is predicted to be faster.
    load_threads: loads that run side by side in a worker.
    """

    address: str | None = None
    traffic_class: str = "agent"
    revision: str | None = None
    save_decoded: bool = True
    decline_slow_loads: bool = True
    load_threads: int = 2
    options: CacheOptions = CacheOptions()  # noqa: RUF009  # frozen


def parse_settings(config: Mapping[str, Any]) -> Settings:
    """Raises `ValueError` for an unknown option or a value of the wrong kind."""
    own = {field.name: getattr(Settings, field.name) for field in fields(Settings) if field.name != "options"}
    tuning = {field.name: field.default for field in fields(CacheOptions)}
    unknown = sorted(set(config) - set(own) - set(tuning))
    if unknown:
        raise ValueError(
            f"kv_connector_extra_config has no option {', '.join(unknown)}; "
            f"there are {', '.join(sorted({*own, *tuning}))}"
        )
    values: dict[str, Any] = {}
    for name, value in config.items():
        default = own[name] if name in own else tuning[name]
        wanted: type | tuple[type, ...] = str if default is None else type(default)
        if wanted is float:
            wanted = (int, float)
        if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
            raise ValueError(f"kv_connector_extra_config: {name} is {value!r}; it must be like {default!r}")
        values[name] = value
    options = CacheOptions(**{name: value for name, value in values.items() if name in tuning})
    settings = Settings(**{name: value for name, value in values.items() if name in own}, options=options)
    client_address(settings.address)  # says what is wrong with it now, not in a worker
    if settings.load_threads < 1:
        raise ValueError(f"load_threads is {settings.load_threads}; it must be positive")
    return settings
