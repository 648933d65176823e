"""The proxy between harnesses and engines that records every call."""
