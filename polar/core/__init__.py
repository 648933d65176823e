"""Pure cores: no I/O, clock, randomness or event loop. They take `now` and return values."""
