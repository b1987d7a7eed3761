"""Tests, by behaviour."""
