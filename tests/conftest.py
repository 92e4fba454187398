"""Fixtures that every floor's tests may use."""
