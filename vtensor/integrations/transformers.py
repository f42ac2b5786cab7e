"""transformers: a KV cache in virtual tensors, and attention over it, for the models of Hugging Face.

Importing this makes ``model.set_attn_implementation("vtensor")`` known.
"""

from vtensor.integrations.adoption import install, uninstall
from vtensor.integrations.decode_step import DecodeStep
from vtensor.integrations.generation import generate
from vtensor.integrations.virtual_cache import VirtualCache
from vtensor.integrations.virtual_layer import VirtualLayer

__all__ = ["DecodeStep", "VirtualCache", "VirtualLayer", "generate", "install", "uninstall"]
