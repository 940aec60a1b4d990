"""Counter-based random numbers: a message's jitter does not depend on the order of drawing.

Philox2x32 with ten rounds (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3",
SC '11) turns (seed, stream, number) into 64 bits. Only integers below 2^64 and plain floating-point sums,
products and quotients are used, so that compiled code gives the same bits.
"""

from __future__ import annotations

import math

_WORD = 0xFFFFFFFF
_MULTIPLIER, _WEYL, _ROUNDS = 0xD256D193, 0x9E3779B9, 10  # as published for Philox2x32
_LN2 = 0.6931471805599453
_SQRT_HALF = 0.7071067811865476


def exponential(seed: int, stream: int, number: int, mean: float) -> int:
    """A draw from the exponential distribution, to the nearest whole number. All arguments are >= 0."""
    high, low = philox(seed, number, stream)
    uniform = (((high << 21) | (low >> 11)) + 1) / 9007199254740992.0  # 53 bits, in (0, 1]
    return int(0.5 - mean * _log(uniform))


def philox(key: int, low: int, high: int) -> tuple[int, int]:
    """Two random 32-bit words for a counter of two words."""
    first, second = low & _WORD, high & _WORD
    for _ in range(_ROUNDS):
        product = first * _MULTIPLIER
        first = ((product >> 32) & _WORD) ^ (key & _WORD) ^ second
        second = product & _WORD
        key += _WEYL
    return first, second


def _log(value: float) -> float:
    """The natural logarithm, by 2 artanh((m-1)/(m+1)); libraries' own differ in the last bit."""
    mantissa, exponent = math.frexp(value)
    if mantissa < _SQRT_HALF:
        mantissa, exponent = 2.0 * mantissa, exponent - 1
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    square = ratio * ratio
    series = 1.0 / 19.0
    for odd in (17.0, 15.0, 13.0, 11.0, 9.0, 7.0, 5.0, 3.0, 1.0):
        series = series * square + 1.0 / odd
    return exponent * _LN2 + 2.0 * ratio * series
