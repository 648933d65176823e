"""The checksum of frames on a gateway's disk: XXH3, which costs a tenth of zlib's CRC-32."""

import xxhash


def checksum(*parts: bytes) -> int:
    """[0, 2^64), of the parts one after the other."""
    if len(parts) == 1:
        return xxhash.xxh3_64_intdigest(parts[0])
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.intdigest()
