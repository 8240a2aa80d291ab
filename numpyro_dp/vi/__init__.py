"""Variational inference: ``DPSVI`` and its estimators."""
