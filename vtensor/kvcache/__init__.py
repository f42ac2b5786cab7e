"""The KV cache: requests in slots, memory below the tokens they hold."""

from vtensor.kvcache.config import KVCacheConfig
from vtensor.kvcache.layers import LayerSpec
from vtensor.kvcache.manager import KVCacheManager
from vtensor.kvcache.slots import SlotState
from vtensor.kvcache.stats import KVCacheStats, SlotResidency, StepResult

__all__ = ["KVCacheConfig", "KVCacheManager", "KVCacheStats", "LayerSpec", "SlotResidency", "SlotState", "StepResult"]
