"""Kernels that read tensors and strides, never pages."""

if __name__ == "triton_kernels":
    raise ImportError("this folder is the module vtensor.triton_kernels: write 'import vtensor.triton_kernels'")
