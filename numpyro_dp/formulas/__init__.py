"""Regressions from formulas, and figures of columns by what is public about them."""
