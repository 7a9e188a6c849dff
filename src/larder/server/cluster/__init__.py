"""Serving from several processes, on one machine or on many."""
