"""Constants of the simulator measured on this machine, and predictions beside measurements."""
