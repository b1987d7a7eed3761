"""Inputs: how the field spells its losses (variants), and what goes wrong with them (faults)."""
