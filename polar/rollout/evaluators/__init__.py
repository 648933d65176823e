"""Evaluators: what scores a finished session on its node."""
