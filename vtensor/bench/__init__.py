"""Measurements: one module a table or figure, and what all of them record."""
