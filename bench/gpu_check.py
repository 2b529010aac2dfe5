"""Checks the kernels and the pipeline on a CUDA device against the CPU: every layout, poisoned outputs, the fuzz test.

``compute-sanitizer python bench/gpu_check.py --small`` finds accesses outside of what is allocated.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "unit"))

from device_fuzz import Settings, fuzz
from kernel_cases import CASES, check_case

from cachesvc.connector.device import CudaDevice
from cachesvc.kernels import kernels_for


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="fewer cases and seeds, for a checker that is slow")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_check: torch finds no CUDA device here")
    device, kernels = CudaDevice(), kernels_for("cuda")
    names = list(CASES)
    for name in names[:: 4 if options.small else 1]:
        check_case(name, kernels, device)
    happened: dict[str, int] = {}
    seeds = 2 if options.small else 40
    for seed in range(seeds):
        for key, value in fuzz(device, seed, Settings(steps=100 if options.small else 300)).items():
            happened[key] = happened.get(key, 0) + value
    print(f"{len(names)} layouts, {seeds} schedules {happened}: all as on the CPU")


if __name__ == "__main__":
    main()
