"""FirstSlots: sequences of one length in the first slots of a manager that nobody else uses."""

from __future__ import annotations

from vtensor.errors import OutOfPagesError, RequestError
from vtensor.kvcache import KVCacheManager
from vtensor.units import format_bytes

__all__ = ["FirstSlots"]


class FirstSlots:
    """Slots 0 .. batch_size - 1 of a manager, in which sequence b is in slot b, and all have as many tokens.

    Parameters
    ----------
    manager : KVCacheManager
    remedy : str
        What to do about a shortage, for its message.
    """

    def __init__(self, manager: KVCacheManager, remedy: str) -> None:
        self._manager, self._remedy = manager, remedy
        self.batch_size = 0

    def resize(self, batch: int) -> None:
        """Have so many sequences; those that come hold nothing."""
        while self.batch_size > batch:
            self.batch_size -= 1
            self._manager.free_reqid(self.batch_size)
        while self.batch_size < batch:
            # All lower slots are active, so this is the lowest id that is not.
            reqid = self._manager.alloc_reqid()
            if reqid != self.batch_size:
                self._manager.free_reqid(reqid)
                raise RequestError("slots of this cache's manager were taken by somebody else")
            self.batch_size += 1

    def step(self, num_tokens: int, held: int) -> None:
        """Commit memory for so many tokens of every sequence, which hold `held`, in all layers; all or nothing.

        Raises
        ------
        OutOfPagesError
            No memory; nothing has changed.
        """
        manager = self._manager
        idle = manager.config.max_batch_size - self.batch_size
        result = manager.step([num_tokens] * self.batch_size + [0] * idle)
        if not result:
            raise OutOfPagesError(
                f"{self.batch_size} sequences of {num_tokens:,} tokens need {result.shortfall_page_groups} more page "
                f"groups of {format_bytes(manager.pool.page_group_bytes)} than can be had on {manager.device}; the "
                f"cache still holds its {held:,} tokens. {self._remedy}"
            )
