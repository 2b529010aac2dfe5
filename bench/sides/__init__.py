"""One file per store. Each is loaded by `worker.py` in an environment of its own, so it imports nothing of the others."""
