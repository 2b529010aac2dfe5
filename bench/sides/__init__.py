"""One file per store. `worker.py` loads each in an environment of its own, so it imports nothing of the others."""
