"""Traces of what was asked, and what a cache would have made of it.

::

    formats     readers: Mooncake, agent sessions, our own; several files merged by time
    simulate    one cache of a capacity, a policy and TTLs
    curve       the hit rate of LRU at every capacity, in one pass
    sampling    a share of the blocks instead of all, for huge traces
    replay      a grid of simulations over a stream, and its results
    plots       results as a picture (extra `plots`)
    workload    seeded agent and chat traffic
    recorder    writes what a daemon is asked; recount: counts that again
"""
