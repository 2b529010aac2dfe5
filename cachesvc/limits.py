"""Every fixed limit of the daemon, and what happens at it. Limits that an operator may want to move are in `config`."""

from __future__ import annotations

from typing import Final

KiB: Final = 1 << 10
MiB: Final = 1 << 20
GiB: Final = 1 << 30

# Calls. Past it: INVALID_ARGUMENT.
MAX_KEYS: Final = 16_384
MAX_PAYLOAD_BYTES: Final = 64 * MiB
MAX_CHUNK_BYTES: Final = 2 * MiB
MAX_NAMESPACE_BYTES: Final = 64 * KiB
MAX_CLIENT_NAME_BYTES: Final = 256
MAX_MODEL_NAME_BYTES: Final = 256
MAX_SHARDS: Final = 1_024
MAX_CLASS_NAME_BYTES: Final = 32

# Deadline of a call, seconds: a client that never answers must not hold a worker for longer.
MAX_DEADLINE_SECONDS: Final = 600.0

# One gRPC message: a chunk or a full list of keys, and its framing. Past it: RESOURCE_EXHAUSTED by gRPC itself.
MAX_MESSAGE_BYTES: Final = MAX_CHUNK_BYTES + 64 * KiB

# Leases. A longer wish is cut to the maximum; a full table answers RESOURCE_EXHAUSTED.
DEFAULT_LEASE_SECONDS: Final = 30.0
MAX_LEASE_SECONDS: Final = 600.0
MAX_LEASES: Final = 16_384

# Attachments (namespace and sizes). A full table forgets the least recently used one, whose clients attach again.
MAX_ATTACHMENTS: Final = 4_096

# Passes remembered so that a repeated Match is accounted once; the oldest is forgotten first.
MAX_REMEMBERED_PASSES: Final = 65_536

# Seconds after which an ended pass counts for good: an engine that asks again does so sooner. One that timed out may
# only have waited long in its engine's queue. Either is less than a minute together with `KEEP_SECONDS`.
CLOSE_SECONDS: Final = 5.0
CLOSE_TIMED_OUT_SECONDS: Final = 25.0

# Rows of the accounting (class, model, tenant). Past it, further ones are counted under "other".
MAX_ACCOUNTING_ROWS: Final = 1_024

# Blocks on disk that the index has room for (55 bytes of memory each, when there). At it the oldest segment goes first.
MAX_BLOCKS: Final = 1 << 28

# Blocks on disk that are also kept as objects, which small look-ups find sooner: those written last.
MAX_HOT_BLOCKS: Final = 65_536

# Traffic classes, with those that only old files name; blocks of a further one count as of the longest-lived.
MAX_CLASSES: Final = 250

# Dropped keys remembered with the reason, so that a miss can be explained (8 bytes each); of those that share one of
# the table's places the oldest is forgotten first.
MAX_GHOSTS: Final = 1 << 20

# Segments open for writing; the least recently written one is sealed first.
MAX_OPEN_WRITERS: Final = 64

# Calls served at once; further ones are queued up to this many more, then refused with RESOURCE_EXHAUSTED.
MAX_QUEUED_CALLS: Final = 128

# Bytes read from one segment in one request: neighbours of a prefix are read together up to this.
MAX_READ_BYTES: Final = 8 * MiB

# Prefixes waiting to be brought from disk into the arena; past it a reader is told that its blocks failed to load.
MAX_QUEUED_PROMOTIONS: Final = 1_024
PROMOTION_THREADS: Final = 2

# Longest time (ms) that a Load waits for a block; a longer wish is cut.
MAX_LOAD_WAIT_MS: Final = 10_000

# Connections to the arena's socket, and to the bulk channel; past it a new one is closed at once.
MAX_SESSIONS: Final = 512

# Seconds that a client on those may take to send the rest of what it began, or to take a reply; then it is cut off.
CLIENT_STALL_SECONDS: Final = 10.0

# Share of an evicted segment's records that may be kept by writing them again; the rest goes, so that room is gained.
MAX_KEPT_SHARE: Final = 0.5

# Free room (in segments) below which housekeeping drops the oldest files, and up to which it does.
HIGH_WATER_SEGMENTS: Final = 1.5
LOW_WATER_SEGMENTS: Final = 2.0

# Bytes that housekeeping reads and writes at once: others wait no longer than for that.
STEP_BYTES: Final = MiB

# Bytes per second, unless the configuration says otherwise: blocks written again when their file goes; and blocks read
# only to see whether they are undamaged.
DEFAULT_REWRITE_RATE: Final = 128 * MiB
DEFAULT_SCRUB_RATE: Final = 8 * MiB

# Seconds between rounds of housekeeping (leases, expiry).
HOUSEKEEPING_SECONDS: Final = 1.0

# Seconds between writing use times to the durable index: a crash forgets as much of them, and nothing else.
SAVE_TOUCHES_SECONDS: Final = 20.0

# Seconds between notes of how far the scrubber has come: a crash repeats as much.
SAVE_SCRUB_SECONDS: Final = 60.0

# Bytes written to see whether a disk that refused a write takes one again.
PROBE_BYTES: Final = 256 * KiB

# Seconds in which writes are refused after the device failed one, before the next is tried.
WRITE_RETRY_SECONDS: Final = 5.0

# A clock that is off by more than this against the monotonic one (seconds) has jumped. It is believed when it has
# stayed there for so long; until then time goes on from before the jump. Over a restart, a longer downtime is a jump.
CLOCK_JUMP_SECONDS: Final = 120.0
CLOCK_TRUST_SECONDS: Final = 3600.0
CLOCK_DOWNTIME_SECONDS: Final = 30 * 86_400.0

# Expiry slices of a class: its TTL in this many parts. More parts expire more exactly and make more, smaller files.
SLICES_PER_TTL: Final = 24

# Rollups: seconds between lines, a part of a minute; days kept, and bytes of their files; past either the oldest file
# is removed, of which a busy day has several.
KEEP_SECONDS: Final = 30
ROLLUP_DAYS: Final = 30
MAX_ROLLUP_BYTES: Final = 64 * MiB

# Buckets that one History streams; more are refused: ask for wider ones.
MAX_HISTORY_BUCKETS: Final = 50_000

# Bytes of trace files that a recording keeps unless told otherwise; past them the oldest file is removed.
DEFAULT_RECORD_BYTES: Final = 256 * MiB

# Events of the recording that wait to be written; past it they are lost, which is counted.
MAX_QUEUED_EVENTS: Final = 100_000

# Traces. A longer line is an error.
MAX_TRACE_LINE_BYTES: Final = 256 * MiB

# Blocks of one request in an agent file, whose few bytes can name any number of them. More are an error.
MAX_TRACE_BLOCKS: Final = 1 << 22

# Dropped blocks that one simulation remembers with the reason, at least; an older one counts as never seen.
MAX_REPLAY_GHOSTS: Final = 1_000_000

# Points that the search for hot blocks counts when a trace is sampled; the rarest half is forgotten at it.
MAX_HOT_CANDIDATES: Final = 40_000
