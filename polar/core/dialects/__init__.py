"""Provider protocols, one file each: bytes in, canonical values and bytes out, nothing else."""
