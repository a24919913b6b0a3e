"""Kernels of the split backward; the Triton ones come with a later release."""
