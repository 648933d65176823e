"""The two moments of a version change that gateways are told about."""

from typing import Literal

Phase = Literal["pending", "settled"]
"""`pending`: the engine stands still and will go on with this version. `settled`: it has it."""
