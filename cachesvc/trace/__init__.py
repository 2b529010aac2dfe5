"""Traces of what was asked: recorded, generated, and replayed."""
