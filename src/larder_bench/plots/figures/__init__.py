"""Figures of `larder plot`, one file each."""
