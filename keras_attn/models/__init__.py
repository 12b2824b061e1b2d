"""Whole models of the papers."""

__all__ = []
