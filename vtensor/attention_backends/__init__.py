"""Attention by any kernel that reads the contiguous layout: our own, torch's, and those of other packages."""

from vtensor.attention_backends.call import attention

__all__ = ["attention"]
