"""Logs: one line a record, with the fields by which a session can be followed."""
