"""Reservation: one range of virtual addresses and its owner."""

from __future__ import annotations

from vtensor.allocator.driver import Driver
from vtensor.errors import DriverError, ReservationError
from vtensor.units import format_bytes

__all__ = ["Reservation"]


class Reservation:
    """A range of addresses with no memory behind it. It never moves and never grows.

    Parameters
    ----------
    driver : Driver
        Of the device whose addresses these are.
    size_bytes : int
        A positive multiple of the driver's granularity.
    readable_holes : bool
        Have what is not mapped read as zeros, for a driver that `has_readable_holes`.

    Raises
    ------
    ReservationError
        The driver has no free range of that size.
    """

    def __init__(self, driver: Driver, size_bytes: int, *, readable_holes: bool = False) -> None:
        if size_bytes <= 0 or size_bytes % driver.granularity_bytes:
            raise ValueError(
                f"size_bytes={size_bytes!r} must be a positive multiple of {driver.granularity_bytes:,}, "
                f"the granularity of {driver.device}"
            )
        self.driver = driver
        self.size_bytes = size_bytes
        try:
            self.base = driver.reserve(size_bytes, readable_holes=readable_holes)
        except DriverError as error:
            raise ReservationError(
                f"{format_bytes(size_bytes)} of addresses cannot be reserved on {driver.device}: {error}; "
                "ask for less, or give back what is not needed"
            ) from error
        self.closed = False

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.base:#x}..{self.base + self.size_bytes:#x}"
        return f"<Reservation {self.driver.device} {format_bytes(self.size_bytes)} {state}>"

    def close(self) -> None:
        """Give the addresses back; nothing may be mapped there any more. A second call does nothing."""
        if not self.closed:
            self.driver.free(self.base, self.size_bytes)
            self.closed = True
