"""What the scheduler's side tells the workers with each step, and what they answer. Plain data: vLLM carries it."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

Pages = tuple[list[int], ...]
"""Page ids by KV part (see `geometry`), in the order of the tokens."""


@dataclass(frozen=True)
class Setup:
    """How the workers attach: the namespace is made once, by the scheduler's side."""

    namespace_json: str
    payload_bytes: int


@dataclass(frozen=True)
class LoadJob:
    """Tokens [`local_tokens`, `end_tokens`) of a prompt are to be loaded into pages. `keys` reach up to the end."""

    request_id: str
    pass_id: bytes
    tenant: bytes
    traffic_class: str
    keys: list[bytes]
    prompt_tokens: int
    local_tokens: int
    end_tokens: int
    pages: Pages


@dataclass(frozen=True)
class SaveJob:
    """Blocks that are full after this step. `keys` are those from block `first_block` on, behind the ones that the
    workers have been told before.

    `pages` has the blocks to be saved, by index; others among the keys are stored already. `stored_blocks`, with the
    first job of a pass: what the daemon had of the prompt when it was asked.
    """

    request_id: str
    pass_id: bytes
    tenant: bytes
    traffic_class: str
    first_block: int
    keys: list[bytes]
    prompt_tokens: int
    stored_blocks: int | None
    pages: dict[int, Pages]


@dataclass
class StepMetadata(KVConnectorMetadata):
    """`scheduled`: requests of this step whose blocks may still be saved, and under which pass. `tokens`: computed."""

    tokens: int = 0
    setup: Setup | None = None
    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)
    scheduled: dict[str, bytes] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class LoadResult:
    """`loaded_tokens`: length of the usable prefix, the local tokens included."""

    request_id: str
    loaded_tokens: int
    loaded_bytes: int
    seconds: float


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """`seconds` that computing `tokens` took; `lost_saves`: blocks that were to be saved and are not; `stored`: keys of
    blocks that are, where vLLM publishes KV events.
    """

    results: list[LoadResult] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    lost_saves: int = 0
    stored: list[bytes] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Of one step: the slowest worker's time."""
        assert isinstance(other, WorkerReport)
        return WorkerReport(
            self.results + other.results,
            max(self.tokens, other.tokens),
            max(self.seconds, other.seconds),
            self.lost_saves + other.lost_saves,
            self.stored + other.stored,
        )
