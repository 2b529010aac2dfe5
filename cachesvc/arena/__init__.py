"""The DRAM tier: one memfd that engines on this host map. `memory` holds it, `slabs` divides it, `arena` fills it."""
