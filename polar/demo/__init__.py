"""The demo: a real model gets better at a task inside an unmodified agent program."""
