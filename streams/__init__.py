"""The topology: FastStream apps of thin handlers, one module a stage.

Importing the package loads nothing; `polar <stage>` imports the module it runs.
"""

MARKER = "polar-rl"
"""Read by `polar` at import: proves that this `streams` package is polar's own."""
