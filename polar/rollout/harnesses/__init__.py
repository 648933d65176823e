"""Harnesses: the agent programs, unmodified."""
