"""The disk tier. `tier` is what others call: blocks in segment files, found through the catalog and the durable index.

One role each: `reading`; `files`, the files as they are, and appending to them; `reclaim`, what makes room and expires;
`durable`, the index that survives a restart; `opening`, what a store holds when it is opened; `health`, whether the
disk takes writes. Calls go tier → opening, reclaim → files → durable, health.
"""
