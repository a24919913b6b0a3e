"""Cutting a model into stages, and splitting its backward into I and W."""
