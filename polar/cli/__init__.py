"""The `polar` command: one module a subcommand. Parse first, import what is heavy inside commands.

Exit status: 0 done, 1 failed, 2 wrong usage, 3 something that is needed is missing.
"""
