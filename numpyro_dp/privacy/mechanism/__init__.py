"""Mechanisms: what bounds one record's signal and privatises the sum, a small file each."""
