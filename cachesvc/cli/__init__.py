"""The ``cachesvc`` command: one file per command, `main` puts them together."""
