"""Measurement of the links between ranks with TCP streams."""
