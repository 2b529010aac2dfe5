"""Options of an adapter, as a person writes them: checked by name and kind when the engine starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from cachesvc.connector.options import CacheOptions
from cachesvc.rpc.address import client_address


@dataclass(frozen=True)
class AdapterSettings:
    """What every adapter has. Subclasses add fields with defaults; `CacheOptions` may be given beside them, by name.

    address: of the daemon; without one ``CACHESVC_ADDRESS``, else the user's own daemon.
    traffic_class: of requests that name none.
    revision: names the weights. Without one they are digested when the engine starts.
    """

    address: str | None = None
    traffic_class: str = "agent"
    revision: str | None = None
    options: CacheOptions = CacheOptions()  # noqa: RUF009  # frozen

    @classmethod
    def parse(cls, config: Mapping[str, Any], source: str) -> Self:
        """`source` is where the options stand, for messages.

        Raises `ValueError` for an unknown option or a value of the wrong kind.
        """
        own = {field.name: getattr(cls, field.name) for field in fields(cls) if field.name != "options"}
        tuning = {field.name: field.default for field in fields(CacheOptions)}
        unknown = sorted(set(config) - set(own) - set(tuning))
        if unknown:
            raise ValueError(
                f"{source} has no option {', '.join(unknown)}; there are {', '.join(sorted({*own, *tuning}))}"
            )
        values: dict[str, Any] = {}
        for name, value in config.items():
            default = own[name] if name in own else tuning[name]
            wanted: type | tuple[type, ...] = str if default is None else type(default)
            if wanted is float:
                wanted = (int, float)
            if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
                raise ValueError(f"{source}: {name} is {value!r}; it must be like {default!r}")
            values[name] = value
        options = CacheOptions(**{name: value for name, value in values.items() if name in tuning})
        settings = cls(**{name: value for name, value in values.items() if name in own}, options=options)
        client_address(settings.address)  # says what is wrong with it now, not in a worker
        return settings
