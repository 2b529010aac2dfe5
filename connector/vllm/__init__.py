"""The connector for vLLM: one flag, and prefixes outlive the engine and are shared with others (``docs/vllm.md``).

vLLM loads `CacheConnector` by ``kv_connector_module_path``, once in its scheduler's process and once in each worker:

===========  ====================================================================================
adapter      vLLM's interface, each call handed to the side that it is for
scheduler    which prefixes are stored, what is to be loaded and saved
worker       loading into and saving from vLLM's KV tensors
metadata     what the two sides tell each other with each step
geometry     KV groups: what a block's payload holds, and where its pages lie in the tensors
identity     the namespace of an engine; salt, adapter and images of a request
settings     ``kv_connector_extra_config``
events       vLLM's KV events
stats        numbers for vLLM's log and its ``/metrics``
===========  ====================================================================================

Two look-ups are made for a hit: the scheduler's, which decides, and the worker's own, with the same keys and the same
pass id. A lease is good only as long as the session lives on which it was taken, and only the process that maps the
arena can see that; a lease handed over from the scheduler could end while a worker still reads. The daemon accounts for
both as one pass, and the second replaces the first.
"""

from cachesvc.connector.vllm.adapter import CacheConnector

__all__ = ["CacheConnector"]
