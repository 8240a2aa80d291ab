"""Mechanisms: they clip each record's signal and add noise to the sum."""
