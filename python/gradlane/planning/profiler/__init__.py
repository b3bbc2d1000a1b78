"""Records what a training step computes, and when gradients appear and parameters are needed.

`recorder` records a training loop, `measure` runs some steps itself, `operations` makes a profile
from operation counts. Profiles and their files are in `gradlane.formats.profile`.
"""
