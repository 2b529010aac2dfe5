"""How calls reach the service: shells that only translate."""
