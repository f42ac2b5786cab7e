"""Bytes and pages: drivers, page pools, reservations, address spaces. Knows nothing of what tensors mean."""

if __name__ == "allocator":
    raise ImportError("this folder is the module vtensor.allocator: write 'import vtensor.allocator'")
