"""Answers of simulations for a person: in words and as a page."""
