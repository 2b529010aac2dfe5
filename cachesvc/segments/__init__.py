"""Segments: immutable, append-once files of many blocks. `format` says what is in one, the rest has one role each."""
