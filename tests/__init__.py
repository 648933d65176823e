"""Tests of polar; `tests.brokers` and the like hold what several of them share."""
