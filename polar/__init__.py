"""polar: reinforcement learning on black-box agent harnesses over a durable log."""

import importlib

__version__ = "0.1.0"


def _check_top_level_names() -> None:
    """`schemas` and `streams` are generic import names: say clearly when another package
    shadows ours instead of failing later with an AttributeError."""
    for name in ("schemas", "streams"):
        module = importlib.import_module(name)
        if getattr(module, "MARKER", None) != "polar-rl":
            raise ImportError(
                f"the module {name!r} at {getattr(module, '__file__', '?')} is not polar's own; "
                f"take it off sys.path or install polar-rl in an environment of its own"
            )


_check_top_level_names()
