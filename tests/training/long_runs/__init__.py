"""Conditions of runs of weeks: very many steps, stopped ranks, full disks."""
