"""Runtimes: the boxes in which harnesses run."""
