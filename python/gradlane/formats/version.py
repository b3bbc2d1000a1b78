"""The version of gradlane."""

__version__ = "0.1.0"
