"""vtensor inside other libraries: one module a library, imported by name only."""
