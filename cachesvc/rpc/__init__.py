"""The wire contract as Python: generated from ``proto/cachesvc/v1`` by ``make proto``, and addresses (a leaf package)."""
