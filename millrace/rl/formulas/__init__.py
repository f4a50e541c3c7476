"""Formulas that several algorithms share."""
