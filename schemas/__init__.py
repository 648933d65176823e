"""Wire contracts of polar: one frozen pydantic model per value of every topic.

Imports pydantic and the standard library only. `schemas.topics` is the one table that
says which model travels on which topic, under which key.
"""

MARKER = "polar-rl"
"""Read by `polar` at import: proves that this `schemas` package is polar's own."""
