"""The laboratory of the papers: their figures, their experiments, and what codecs do to learning.

A distribution beside `gradlane`, which finds its commands and pages by `plugin.PLUGIN`.
"""
