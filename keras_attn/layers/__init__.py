"""Attention mechanisms as Keras layers."""

__all__ = []
