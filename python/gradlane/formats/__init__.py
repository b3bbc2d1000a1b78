"""Data that the wings exchange: profiles, timelines, state, rates, whole files."""
