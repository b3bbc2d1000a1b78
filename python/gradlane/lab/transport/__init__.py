"""Measurements of the transport alone, without any compute."""
