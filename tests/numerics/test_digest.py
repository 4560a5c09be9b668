"""The digest: golden value, sum over shards, and sensitive to every single change."""

import torch

from halfbyte.numerics.digest import digest_words
from halfbyte.numerics.hashing import MASK, key64, mix64, signed


def mix64_of_int(x: int) -> int:
    """SplitMix64's finalizer in Python's integers, the outside oracle."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def test_mix64_equals_unsigned_arithmetic() -> None:
    values = [0, 1, MASK, 1 << 63, *(key64(i) for i in range(100))]
    found = mix64(torch.tensor([signed(value) for value in values])).tolist()
    assert [value & MASK for value in found] == [mix64_of_int(value) for value in values]


def test_digest_is_the_sum_that_it_says() -> None:
    words = [[1, 2, 3], [-4, 5, 6]]
    total = 0
    for row in range(2):
        for column in range(3):
            place = (row * 3 + column) * 0x9E3779B97F4A7C15 + (7 + 1) * 0xD1342543DE82EF95
            total += mix64_of_int((mix64_of_int(place & MASK) + words[row][column]) & MASK)
    assert digest_words(torch.tensor(words), component=7) == total & MASK


def test_shards_add_up() -> None:
    words = torch.randint(-(2**62), 2**62, (300, 1200))  # more than one chunk
    top = digest_words(words[:7], component=0)
    left = digest_words(words[7:, :500], component=0, row_offset=7, width=1200)
    right = digest_words(words[7:, 500:], component=0, row_offset=7, column_offset=500, width=1200)
    assert (top + left + right) & MASK == digest_words(words, component=0)


def test_every_bit_place_and_component_counts() -> None:
    words = torch.arange(64).reshape(8, 8)
    digests = {digest_words(words, component=0), digest_words(words, component=1), digest_words(words.T, component=0)}
    for bit in range(63):
        changed = words.clone()
        changed[3, 4] ^= 1 << bit
        digests.add(digest_words(changed, component=0))
    assert len(digests) == 3 + 63


def test_an_empty_shard_adds_nothing() -> None:
    assert digest_words(torch.empty(0, 8, dtype=torch.int64), component=0) == 0
