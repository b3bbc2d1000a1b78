"""Tests of gradlane."""
