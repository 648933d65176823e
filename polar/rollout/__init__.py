"""Rollouts: the HTTP API that accepts tasks, and the node that runs their sessions."""
