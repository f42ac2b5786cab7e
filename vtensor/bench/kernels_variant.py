"""Variants of which one that fails does not end the run: it says why, and is not timed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from vtensor.bench.frame import Variant

__all__ = ["KernelVariant", "shortened"]


@dataclass(kw_only=True)
class KernelVariant(Variant):
    """A variant that may fail, as other libraries' kernels do on some shapes or machines.

    Parameters
    ----------
    is_ours : bool
        Whether it must not; that is for whoever looks at `failed` after the run.

    Attributes
    ----------
    failed : str or None
        Why it was not timed.
    """

    is_ours: bool = True
    failed: str | None = field(init=False, default=None)

    @abstractmethod
    def prepare(self) -> None:
        """Take what all rounds need."""

    @abstractmethod
    def compare(self) -> None:
        """Raise unless the work is done right."""

    @abstractmethod
    def get_ready(self) -> None:
        """Pay what is paid once."""

    @abstractmethod
    def sample(self) -> Mapping[str, Sequence[float]]:
        """Do the work of one round; the samples of each metric."""

    @abstractmethod
    def drop(self) -> None:
        """Drop the tensors of its own."""

    def close(self) -> None:
        """Drop all tensors, also those that it shares, after the last round."""
        self.drop()

    def set_up(self, resources: ExitStack) -> None:
        """See `Variant.set_up`."""
        resources.callback(self.close)
        self._try(self.prepare)

    def check(self) -> None:
        """See `Variant.check`."""
        self._try(self.compare)

    def warm_up(self) -> None:
        """See `Variant.warm_up`."""
        self._try(self.get_ready)

    def measure(self) -> Mapping[str, Sequence[float]]:
        """See `Variant.measure`."""
        if self.failed is not None:
            self.details["failed"] = self.failed
            return {}
        return self.sample()

    def _try(self, step: Callable[[], None]) -> None:
        if self.failed is not None:
            return
        try:
            step()
        except Exception as error:  # whatever a kernel raises
            self.failed = shortened(error)
            self.drop()


def shortened(error: Exception) -> str:
    """What an error says, in a line."""
    return " ".join((str(error) or type(error).__name__).split())[:300]
