"""Measuring, for `cachesvc bench` and `bench/rivals.py`. A client of the daemon: nothing of the daemon imports it.

``harness``   results and their JSON, the machine, sides timed in turns
``buffers``   warm page-aligned memory, and copying between such memories
``process``   a daemon of our own to measure
``client``    puts and gets as an engine's connector makes them
``stream``    a raw TCP stream on loopback, the ceiling of what travels
``suite``     what `cachesvc bench` measures
``table``     tables of results, for the terminal and for `docs/performance.md`
"""
