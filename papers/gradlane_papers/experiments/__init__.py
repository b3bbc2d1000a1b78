"""The experiments of the papers as presets: which cells are measured, and what is simulated.

A preset keeps everything in one folder: `results.json` (measured and simulated rows; whole after
every run), `results.csv` and `report.html`. Given again, a command goes on where it stopped.
"""
