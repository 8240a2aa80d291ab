"""Langevin samplers that use the privacy noise as their thermal noise."""
