"""The driver table: virtual-memory calls of the host and of CUDA behind one interface."""

from vtensor.allocator.driver.base import Call, Driver
from vtensor.allocator.driver.registry import get_driver

__all__ = ["Call", "Driver", "get_driver"]
