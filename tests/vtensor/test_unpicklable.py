"""Owners of memory refuse to be copied, at once: their tables may be longer than memory."""

from __future__ import annotations

import copy
import pickle
import resource
from collections.abc import Callable
from typing import Any

import pytest

import vtensor as vt

CONFIG = vt.KVCacheConfig(num_layers=2, num_kv_heads=1, head_dim=64, max_batch_size=4, max_context_tokens=1 << 20)


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps], ids=lambda how: how.__name__)
@pytest.mark.parametrize("what", ["manager", "pool", "driver", "space", "region"])
def test_refused(what: str, how: Callable[[Any], Any]) -> None:
    with vt.KVCacheManager(CONFIG, device="cpu") as cache:
        owners = {
            "manager": cache,
            "pool": cache.pool,
            "driver": cache.pool.driver,
            "space": cache._region.space,
            "region": cache._region,
        }
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(vt.VTensorError, match="cannot be copied or pickled"):
            how(owners[what])
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000, "KiB"
