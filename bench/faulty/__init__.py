"""Parts of `bench/faults.py`: `model`, what must be there; `client`, engines; `daemon`, what is killed; `loops`."""
