"""Between the arena and an engine's KV on a device, at the speed of the link. Imports torch: not imported elsewhere.

::

    staging = DeviceStaging(CudaDevice())
    cache = PrefixCache(namespace, payload_bytes, staging=staging)    # saves go by way of the device's own memory
    transfers = staging.transfers(pool)                               # a `kernels.PagedPool`: the engine's KV
    loads = DeviceLoads(transfers)

    load = loads.start(cache, p, tables, hit_blocks=...)              # in a thread; tables(first_block, count)
    while not load.can_start: ...                                     # other requests go on
    for layer in layers:                                              # on the device it waits, not on the host
        load.wait_layer(stream, layer)
        ...
    if load.result(stream) < p.hit_tokens: ...                        # the step is void, compute from there on

    def gather(first_block, buffers):                                 # for cache.save
        buffers.filled(transfers.stage(tables(first_block, len(buffers)), buffers.blocks))

=========  ========================================================================================
cuda       the CUDA runtime's calls that torch does not offer, each with its error's name
device     streams and events: CUDA's, behind an interface that tests implement on the CPU
windows    which host memory the device reaches
copies     many payloads between host and device in as few copies as possible
transfers  loads, layer by layer, and saves by way of staging
staging    the save queue's buffers in the device's memory, and how they get into the arena
loads      loads in threads, which an engine waits for layer by layer
=========  ========================================================================================
"""

from cachesvc.connector.device.device import CudaDevice, Device, Event, Stream
from cachesvc.connector.device.loads import DeviceLoad, DeviceLoads
from cachesvc.connector.device.staging import DevicePayloads, DeviceStaging
from cachesvc.connector.device.transfers import Transfers

__all__ = [
    "CudaDevice",
    "Device",
    "DeviceLoad",
    "DeviceLoads",
    "DevicePayloads",
    "DeviceStaging",
    "Event",
    "Stream",
    "Transfers",
]
