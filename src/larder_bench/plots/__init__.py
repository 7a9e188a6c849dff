"""Figures and a report, drawn from result files alone: no model is loaded, nothing is measured."""
