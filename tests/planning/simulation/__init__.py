"""Tests of profiles, simulations and the answers that follow from them."""
