"""A run's topics as a folder of segment files: written, read, checked, copied into topics again."""
