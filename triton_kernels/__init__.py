"""Kernels that read tensors and strides, never pages."""

if __name__ == "triton_kernels":
    raise ImportError("this folder is the module vtensor.triton_kernels: write 'import vtensor.triton_kernels'")

from vtensor.triton_kernels.append import append_kv
from vtensor.triton_kernels.attention import decode_attention, prefill_attention

__all__ = ["append_kv", "decode_attention", "prefill_attention"]
