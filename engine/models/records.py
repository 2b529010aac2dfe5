"""Records of a compressed KV: values with a scale for every few of them, in 8 or 4 bits.

* ``fp8``: e4m3 values, and for every 32 of them a power of two as a scale (e8m0), as OCP's MX formats have it:
  512 values take 528 bytes.
* ``fp4``: e2m1 values, two to a byte, the first in the low half, and for every 16 an e4m3 scale: 512 values take 288.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

_FP8_MAX: Final = 448.0
_FP4_MAX: Final = 6.0
_FP4_VALUES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP8_GROUP: Final = 32
_FP4_GROUP: Final = 16
_E8M0_BIAS: Final = 127
_E4M3_TINY: Final = 2.0**-9

FORMATS: Final = ("fp8", "fp4")
GROUP: Final = {"fp8": _FP8_GROUP, "fp4": _FP4_GROUP}


def record_bytes(values: int, form: str) -> int:
    """Size of a record of so many values, a multiple of the format's group."""
    return values + values // _FP8_GROUP if form == "fp8" else values // 2 + values // _FP4_GROUP


def encode(x: Tensor, form: str) -> Tensor:
    """x [..., values] -> uint8 [..., record_bytes(values)]."""
    return _encode_fp8(x.float().contiguous()) if form == "fp8" else _encode_fp4(x.float().contiguous())


def decode(records: Tensor, values: int, form: str, dtype: torch.dtype) -> Tensor:
    """uint8 [..., record_bytes(values)] -> [..., values] in `dtype`."""
    return (_decode_fp8(records, values) if form == "fp8" else _decode_fp4(records, values)).to(dtype)


def _encode_fp8(x: Tensor) -> Tensor:
    grouped = x.view(*x.shape[:-1], x.shape[-1] // _FP8_GROUP, _FP8_GROUP)
    # The exponent of the smallest power of two above largest / 448: nothing is cut off.
    exponent = torch.frexp(grouped.abs().amax(-1) / _FP8_MAX).exponent.clamp(1 - _E8M0_BIAS, _E8M0_BIAS - 1)
    scaled = (grouped * _power_of_two(-exponent)[..., None]).clamp(-_FP8_MAX, _FP8_MAX)
    values = scaled.to(torch.float8_e4m3fn).view(torch.uint8).flatten(-2)
    return torch.cat((values, (exponent + _E8M0_BIAS).to(torch.uint8)), -1)


def _decode_fp8(records: Tensor, values: int) -> Tensor:
    data, scales = records[..., :values].contiguous(), records[..., values:]
    grouped = data.view(torch.float8_e4m3fn).float().view(*data.shape[:-1], values // _FP8_GROUP, _FP8_GROUP)
    return (grouped * _power_of_two(scales.to(torch.int32) - _E8M0_BIAS)[..., None]).flatten(-2)


def _power_of_two(exponent: Tensor) -> Tensor:
    """Exactly, from the bits of a float32; `torch.ldexp` goes through `pow`, which need not be exact."""
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)


def _encode_fp4(x: Tensor) -> Tensor:
    grouped = x.view(*x.shape[:-1], x.shape[-1] // _FP4_GROUP, _FP4_GROUP)
    scale = (grouped.abs().amax(-1) / _FP4_MAX).clamp(_E4M3_TINY, _FP8_MAX).to(torch.float8_e4m3fn)
    scaled = (grouped / scale.float()[..., None]).flatten(-2)
    known = torch.tensor(_FP4_VALUES, device=x.device)
    nearest = torch.bucketize(scaled.abs(), (known[1:] + known[:-1]) / 2)
    codes = (nearest + 8 * (scaled < 0)).to(torch.uint8)
    return torch.cat((codes[..., ::2] | codes[..., 1::2] << 4, scale.view(torch.uint8)), -1)


def _decode_fp4(records: Tensor, values: int) -> Tensor:
    data, scales = records[..., : values // 2], records[..., values // 2 :].contiguous()
    codes = torch.stack((data & 15, data >> 4), -1).flatten(-2).long()
    known = torch.tensor((*_FP4_VALUES, *(-value for value in _FP4_VALUES)), device=records.device)
    grouped = known[codes].view(*codes.shape[:-1], values // _FP4_GROUP, _FP4_GROUP)
    return (grouped * scales.view(torch.float8_e4m3fn).float()[..., None]).flatten(-2)
